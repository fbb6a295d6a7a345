"""The ledger of a run: its database, its archive, and the store that keeps the core's changes in them."""
