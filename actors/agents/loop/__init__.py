"""The loop agent: parsers of actions, context policies and the loop itself."""
