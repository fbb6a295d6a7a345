"""Sandboxes by runc and runsc, without a daemon."""
