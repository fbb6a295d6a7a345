"""Servers that give sandboxes to other programs: the API of E2B, and commands over HTTP."""
