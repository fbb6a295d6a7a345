"""Sandboxes of the E2B server: their life, processes, watched folders, keys and images."""
