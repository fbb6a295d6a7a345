"""What needs nothing else of headrace: files that are replaced whole, databases."""
