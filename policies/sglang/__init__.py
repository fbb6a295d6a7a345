"""SGLang: the HTTP client, differences between server versions, and server processes."""
