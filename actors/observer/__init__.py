"""What watches a run without being needed by it: the export of traces, the page, and the metrics."""
