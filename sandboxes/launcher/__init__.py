"""Launcher process, which owns all local sandboxes on one host and uses only the standard library."""
