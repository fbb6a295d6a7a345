"""Sandboxes of the E2B server: their life cycle, processes, watched folders, keys and images."""
