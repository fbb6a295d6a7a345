"""Trajectories: tokens, versions, and how they are stored."""
