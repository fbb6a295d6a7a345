"""Everything with a cursor that must survive a restart: tasks, groups, attempts, batches, versions."""
