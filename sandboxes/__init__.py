"""A place to run commands: no Ray, no tokens."""
