"""The policy network and its files: configuration, weights, the forward pass."""
