"""Agents: programs in sandboxes, loops, and the registry of both."""
