"""Long runs: killed again and again, or as large as months of training leave them."""
