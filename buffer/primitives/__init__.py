"""Primitives that depend on nothing else in headrace: durable files, file locks, databases, registries."""
