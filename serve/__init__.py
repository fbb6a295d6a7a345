"""What agents and people talk to (gateway), and what reports (telemetry, control)."""
