"""Telemetry of a run: spans, retention, progress and plots."""
