"""Local sandboxes based on Linux namespaces: the provider, and the clients for its launcher and sandboxes."""
