"""`scripts/bench gateway`."""
