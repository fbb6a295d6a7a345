"""Running rollouts: dispatcher, workers, stations, and records of evaluation rollouts."""
