"""`scripts/bench push`."""
