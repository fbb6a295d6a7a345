"""Ranks of the Megatron learner: what one rank computes, and what the learner makes of all of them."""
