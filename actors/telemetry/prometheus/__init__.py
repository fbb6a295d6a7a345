"""Metrics of a run for Prometheus, computed from the files of its directory."""
