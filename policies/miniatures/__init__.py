"""Miniatures of published systems: small vocabularies, generated tasks and warm starts."""
