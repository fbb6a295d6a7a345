"""What a run shows: slow rollouts, spans, metrics for Prometheus, and the page."""
