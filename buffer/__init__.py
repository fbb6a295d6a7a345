"""The state that must survive a restart: tasks, groups, attempts, batches and policy versions."""
