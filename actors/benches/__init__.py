"""The code of `scripts/bench` and `scripts/soak`."""
