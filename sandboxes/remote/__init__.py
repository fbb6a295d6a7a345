"""Provider `remote`: sandboxes of other hosts through their exec servers, and what both sides of that wire share."""
