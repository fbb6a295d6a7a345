"""Evaluators that call a service of the recipe: reward servers and judges of outcomes."""
