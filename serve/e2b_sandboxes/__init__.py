"""What the E2B server knows of its sandboxes: their life, processes, watched folders, keys and images."""
