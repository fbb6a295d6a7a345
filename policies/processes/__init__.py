"""Processes of engines, which are started, supervised, and ended with their parent."""
