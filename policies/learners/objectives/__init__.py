"""Objectives: pure functions from flat arrays of trained tokens to losses per token, and their configuration."""
