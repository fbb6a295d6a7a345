"""Parts of the learner bench, `scripts/bench learner`."""
