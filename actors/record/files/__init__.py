"""Records of a run: its directory, metrics, telemetry, push costs, station loads and retention."""
