"""The inference engines of a run: where they come from, who serves, how weights reach them, what outlives a crash."""
