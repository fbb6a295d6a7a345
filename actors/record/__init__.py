"""Records of a run: its directory, metrics, telemetry, cost of pushes, load of stations, retention."""
