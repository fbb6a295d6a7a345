"""An exec server: sandboxes of this host, or of several, lent over HTTP/JSON to programs on other hosts."""
