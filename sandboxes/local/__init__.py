"""Local sandboxes on Linux namespaces: the provider, and what its processes hold of a sandbox."""
