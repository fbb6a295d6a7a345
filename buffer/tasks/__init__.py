"""Tasks: their files, their parts, and the data sets of others."""

from headrace.buffer.tasks.task import load_tasks

__all__ = ["load_tasks"]
