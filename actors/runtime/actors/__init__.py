"""Runtime of actors: spawning, calling, retrying and supervising them, with Ray or in one process."""
