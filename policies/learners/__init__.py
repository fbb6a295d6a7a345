"""Learners (Megatron, slime and simulated), objectives and checkpoints."""
