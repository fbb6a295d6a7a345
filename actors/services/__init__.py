"""Services that environments and evaluators call: retrievers, helper models and user simulators."""
