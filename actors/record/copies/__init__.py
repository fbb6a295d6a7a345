"""Files that a run's actors write on other nodes, brought to the state folder of the control node."""
