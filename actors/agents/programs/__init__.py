"""Agents that the worker can run on a task."""
