"""Simulated tasks, durations and engines, which take time instead of computing and can be named in recipes."""
