"""Provider `remote`, for sandboxes behind exec servers, and the parts of the protocol that client and server share."""
