"""Why rollouts were slow: what is typical, which ones were not, and what is running now."""
