"""Evaluation on held-out tasks: `headrace eval` and its service."""
