"""Linux as the launcher needs it: namespaces, control groups, mounts, ids, system calls; standard library only."""
