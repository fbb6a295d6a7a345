"""Telemetry of a run: spans, their files and how long they are kept."""
