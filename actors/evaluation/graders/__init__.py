"""Graders: checks, tests of repositories, answers and plug-ins, and what is collected of an agent's work."""
