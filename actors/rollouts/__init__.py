"""From an order to a result: dispatcher, workers, stations, and what is kept of evaluation rollouts."""
