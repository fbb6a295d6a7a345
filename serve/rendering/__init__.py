"""Rendering of conversations to token ids."""
