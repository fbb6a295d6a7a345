"""Evaluation on held-out tasks: answers, what is kept of each, the summary, and `headrace eval`."""
