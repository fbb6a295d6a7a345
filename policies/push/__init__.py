"""Weight push: its phases, its execution, its sender and transfers."""
