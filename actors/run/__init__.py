"""A run as a whole: its configuration, start, supervision, end and report."""
