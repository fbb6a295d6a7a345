"""Provider of sandboxes in runc and runsc containers, without a daemon."""
