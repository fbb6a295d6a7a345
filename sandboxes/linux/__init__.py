"""Linux kernel interfaces of the launcher: namespaces, control groups, mounts, ids; standard library only."""
