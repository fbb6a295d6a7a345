"""Evaluators, which score the work of agents in clean sandboxes."""
