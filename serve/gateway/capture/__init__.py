"""Capture of sessions: token trie, events, session log and training rows."""
