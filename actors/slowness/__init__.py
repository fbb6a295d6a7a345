"""Why rollouts were slow: what is typical, which ones were not, and what is running now."""
"""Verdicts on slow rollouts: what is typical, what held one up, which factor slow ones share, and what it cost."""
