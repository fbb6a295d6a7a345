"""What people see of a run: spans, metrics, progress, plots."""
