"""From messages to token ids."""
