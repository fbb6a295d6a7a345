"""Sandboxes at e2b.dev, or any server that speaks its API."""
