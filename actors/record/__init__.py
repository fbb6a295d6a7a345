"""What a run writes about itself: its directory, metrics, telemetry, what pushes cost."""
