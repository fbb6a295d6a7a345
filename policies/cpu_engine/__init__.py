"""Embedded CPU engine, which serves a small Qwen3 model with SGLang's HTTP routes."""
