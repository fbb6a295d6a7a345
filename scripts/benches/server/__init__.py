"""Benches of `headrace sandbox serve`."""
