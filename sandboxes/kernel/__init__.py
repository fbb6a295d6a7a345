"""Linux kernel interfaces of the launcher: namespaces, control groups, mounts, ids, system calls; standard library
only."""
