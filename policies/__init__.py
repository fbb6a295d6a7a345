"""The model: engines, learners, weights, objectives."""
