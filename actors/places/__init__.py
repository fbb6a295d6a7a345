"""Actors of sandboxes and the gateway: pool, leases and providers."""
