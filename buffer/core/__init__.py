"""The replay buffer's pure core: groups, batches, outages and their state, without clock or I/O."""
