"""Primitives that need nothing else of headrace: durable files, file locks, databases, registries."""
