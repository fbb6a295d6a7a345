"""Benches of `headrace serve sandbox`."""
