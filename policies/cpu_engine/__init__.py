"""Embedded CPU engine, which serves a small Qwen model with SGLang's HTTP routes."""
