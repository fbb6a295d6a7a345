"""A cluster: its runs, its control API, and its nodes."""
