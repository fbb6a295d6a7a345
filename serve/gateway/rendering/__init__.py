"""Rendering of conversations into token ids."""
