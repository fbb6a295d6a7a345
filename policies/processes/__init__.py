"""Engine processes, which are started, supervised, and stopped when their parent dies."""
