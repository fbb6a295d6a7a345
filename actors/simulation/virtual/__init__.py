"""Simulation of a run in virtual time: the ordinary actors, with simulated engines, learner and sandboxes."""
