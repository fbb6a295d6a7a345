"""Values that follow from the model, the machine and the agent: facts, estimates of memory, and a rule for each key."""
