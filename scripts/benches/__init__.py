"""Code of `scripts/bench` and `scripts/soak`; not part of the wheel."""
