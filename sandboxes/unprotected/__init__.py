"""Plain processes of the host: protects nothing, and says so."""
