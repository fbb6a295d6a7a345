"""Runs in virtual time, and the search for settings in it."""
