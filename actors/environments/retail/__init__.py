"""The retail environment of tau-bench."""
