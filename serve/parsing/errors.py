"""Errors of the folder `parsing`.

ServeError
└── ParserUnknown            no parser of this name; the message lists the known ones
    └── ParserMissing        the parser is one of SGLang's, which is not installed here
"""

from __future__ import annotations

from headrace.serve.errors import ServeError


class ParserUnknown(ServeError):
    """No parser has this name. Knob: gateway.parser."""


class ParserMissing(ParserUnknown):
    """The parser needs SGLang, which is not installed. Knobs: gateway.parser, or install SGLang beside the gateway."""
