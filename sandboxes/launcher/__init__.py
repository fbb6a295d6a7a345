"""The launcher: a process of the standard library alone that owns all local sandboxes of one host."""
