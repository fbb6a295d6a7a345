"""Provider of sandboxes in containers of runc and runsc, without a daemon."""
