"""Patches that cheat, and honest ones beside them, for `scripts/bench cheats`."""
