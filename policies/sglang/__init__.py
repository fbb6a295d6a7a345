"""SGLang: the client of its HTTP contract, by server version, and servers of its own environment."""
