"""A standalone gateway in several processes behind one address."""
