"""Parts of the push bench, `scripts/bench push`."""
