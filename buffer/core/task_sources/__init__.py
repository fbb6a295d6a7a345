"""Several sources of tasks in one run: their shares, and which of them starts rollouts next."""
