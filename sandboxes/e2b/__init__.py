"""Provider of sandboxes at e2b.dev, or at any server with its API."""
