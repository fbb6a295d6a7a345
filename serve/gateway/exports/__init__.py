"""Forms in which a finished session is exported for other trainers: rows, Harbor's ATIF and Harbor's RolloutDetail."""
