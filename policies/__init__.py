"""The model side of a run: engines, learners, weights and objectives."""
