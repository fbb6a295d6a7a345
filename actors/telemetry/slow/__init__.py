"""Why rollouts were slow: what is typical, what held one up, which factor slow ones share, and what runs now."""
