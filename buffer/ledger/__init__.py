"""The ledger of a run: its database, its archive, and the store that writes the core's changes to them."""
