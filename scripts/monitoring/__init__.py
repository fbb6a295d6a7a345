"""Rules, alerts and dashboards over the exported metrics, and the files that scripts/monitoring_files.py writes."""
