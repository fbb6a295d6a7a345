"""The section `agent` of a recipe, and the registry of all agents that it can name."""
