"""Records of a run: its files, copies of those of other nodes, and its storage."""
