"""Actors for the gateway and the sandboxes, with the sandbox leases and providers."""
