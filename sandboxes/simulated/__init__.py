"""A provider with a latency and failure model, for plans and tests."""
