"""Inference engines of a run: starting, attaching, supervision, pushes of weights, and recovery after a crash."""
