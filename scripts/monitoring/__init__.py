"""Rules, alerts and dashboards over the exported metrics, and the files that `scripts/generate monitoring` writes."""
