"""Connection to a Ray cluster, and its checks before a run is placed there."""
