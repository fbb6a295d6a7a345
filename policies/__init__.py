"""Model of a run: engines, learners, weights and objectives."""
