"""Learners: objectives, the Megatron learner, the simulated one, checkpoints."""
