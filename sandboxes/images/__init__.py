"""Images of one host: references, archives and folders become layers."""
