"""Evaluators: score what an agent left behind, always in a clean sandbox."""
