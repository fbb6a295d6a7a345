"""Launcher process, which owns all local sandboxes of one host and uses the standard library only."""
