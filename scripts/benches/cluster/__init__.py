"""Benches over a Ray cluster of hosts of namespaces: costs beside a local Ray, and a soak with faults of hosts."""
