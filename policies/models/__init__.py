"""The policy network and its files: config, weights and forward pass."""
