"""Evaluators, which score agents' work in clean sandboxes."""
