"""Sandboxes that run commands; independent of Ray and of tokens."""
