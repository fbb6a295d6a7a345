"""Learners (Megatron and simulated), objectives and checkpoints."""
