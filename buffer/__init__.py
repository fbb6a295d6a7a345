"""The state of a run that must survive a restart: tasks, groups, attempts, batches and policy versions."""
