"""The ordinary actors over simulated engines, learner and sandboxes, in virtual time."""
