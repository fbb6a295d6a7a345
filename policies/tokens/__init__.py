"""Chat templates and tokenizers: from messages to ids and back."""
