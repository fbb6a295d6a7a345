"""Helpers shared by the tests: builders, scripted engines and agents, small models, and rigs of real parts."""
