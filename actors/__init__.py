"""Who runs, in what order: Ray actors, the service, the command line."""
