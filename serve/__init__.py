"""Servers that agents and users connect to (gateway, sandbox servers), and their telemetry."""
