"""What recipes can name in place of real parts: tasks, durations and engines that take time instead of computing."""
