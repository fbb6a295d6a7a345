"""A weight push: its order, its execution, the sender and what travels."""
