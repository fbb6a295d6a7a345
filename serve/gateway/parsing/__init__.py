"""Parsers of sampled text: reasoning, text and tool calls."""
