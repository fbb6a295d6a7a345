"""Inference engines of a run: starting, attaching, supervision, weight pushes, and recovery after a crash."""
