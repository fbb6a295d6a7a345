"""Local sandboxes on Linux namespaces: the provider, and the clients of its launcher and sandboxes."""
