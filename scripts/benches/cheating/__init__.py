"""`scripts/bench cheats`."""
