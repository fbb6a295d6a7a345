"""Provider that runs plain processes on the host, without protection."""
