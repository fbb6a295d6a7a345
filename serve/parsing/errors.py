"""Errors of the folder `parsing`.

ServeError
└── ParserUnknown            no parser of this name; the message lists those there are
    └── ParserMissing        it is one of SGLang's, which is not installed here
"""

from __future__ import annotations

from headrace.serve.errors import ServeError


class ParserUnknown(ServeError):
    """Knob: gateway.parser."""


class ParserMissing(ParserUnknown):
    """A parser of SGLang's without SGLang. Knobs: gateway.parser, or install it beside the gateway."""
