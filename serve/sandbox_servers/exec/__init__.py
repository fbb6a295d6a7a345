"""Exec server, which leases sandboxes of one or several hosts over HTTP/JSON to programs on other hosts."""
