"""Generated task families, and converters from data sets to headrace tasks."""
