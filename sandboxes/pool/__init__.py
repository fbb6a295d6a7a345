"""Pool of sandboxes: admission, leases, and removal of orphans."""
