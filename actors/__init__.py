"""Ray actors, the service that runs them, and the command line."""
