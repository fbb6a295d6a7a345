"""Provider of plain processes of the host, without protection."""
