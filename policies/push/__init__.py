"""Weight push: its phases, its execution, its senders and their transfers."""
