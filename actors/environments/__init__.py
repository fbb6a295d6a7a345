"""Environments: what a loop agent's actions act on, and what it observes."""
