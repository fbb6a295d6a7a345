"""How actors are spawned, called, retried and watched: over Ray or in one process."""
