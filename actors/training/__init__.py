"""The learner's loop and the replay buffer's actor."""
