"""What the gateway costs: the parts of `scripts/bench gateway`."""
