"""Errors of tokenizers and chat templates. Each message is one line with the file, the numbers and the fix.

PolicyError
└── ModelInvalid
    └── TokenizerInvalid        a tokenizer file is missing, unreadable or incomplete
        ├── TokenizerMismatch   the tokenizer's ids are not the model's
        └── TemplateRefused     the chat template cannot render these messages, or cannot be extended turn by turn
"""

from __future__ import annotations

from headrace.policies.errors import ModelInvalid


class TokenizerInvalid(ModelInvalid):
    """A tokenizer file is missing, unreadable or incomplete."""


class TokenizerMismatch(TokenizerInvalid):
    """The ids of the tokenizer do not match the model; the message has both numbers."""


class TemplateRefused(TokenizerInvalid):
    """The chat template refuses the messages, or cannot be extended turn by turn."""
