"""Simulated provider with a model of latency and failures, for planning and tests."""
