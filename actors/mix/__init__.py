"""The sources of tasks that a recipe names."""
