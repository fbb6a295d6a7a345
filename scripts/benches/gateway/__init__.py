"""Parts of the gateway bench, `scripts/bench gateway`."""
