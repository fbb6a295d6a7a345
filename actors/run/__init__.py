"""Configuration, start, supervision, end and report of a run."""
