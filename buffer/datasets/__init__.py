"""Generated task families and converters of data sets to headrace tasks."""
