"""What watches a run without being needed by it: the page, and the actor that serves it and sends traces."""
