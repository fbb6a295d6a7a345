"""Tokenizers and chat templates, which convert messages to ids and back."""
