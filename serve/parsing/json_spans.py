"""JSON objects inside a text, with the places of their values.

Invariant: what is read here is JSON by the standard: no NaN, no bare line ends in strings, no trailing comma.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

_BLANKS = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _unread(number: str) -> int:
    """Nobody computes with numbers here, and an int of 5,000 digits would be an error."""
    del number
    return 0


_DECODER = json.JSONDecoder(parse_int=_unread, parse_float=_unread, parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class Value:
    """A value (numbers are 0) and its text."""

    value: Any
    text: str


def after_blanks(text: str, start: int) -> int:
    found = _BLANKS.match(text, start)
    return found.end() if found else start


def read_object(text: str, start: int) -> tuple[dict[str, Value], int] | None:
    """The fields of the object that begins at `start` and where it ends; None when there is no whole object."""
    if text[start : start + 1] != "{":
        return None
    fields: dict[str, Value] = {}
    position = after_blanks(text, start + 1)
    if text[position : position + 1] == "}":
        return fields, position + 1
    try:
        while True:
            key, position = _DECODER.raw_decode(text, position)
            position = after_blanks(text, position)
            if not isinstance(key, str) or text[position : position + 1] != ":":
                return None
            begin = after_blanks(text, position + 1)
            value, position = _DECODER.raw_decode(text, begin)
            fields[key] = Value(value, text[begin:position])
            position = after_blanks(text, position)
            if text[position : position + 1] == "}":
                return fields, position + 1
            if text[position : position + 1] != ",":
                return None
            position = after_blanks(text, position + 1)
    except (ValueError, RecursionError):
        return None


def object_text(text: str) -> str | None:
    """The text without blanks around it when it is one JSON object."""
    start = after_blanks(text, 0)
    found = read_object(text, start)
    if found is None or after_blanks(text, found[1]) != len(text):
        return None
    return text[start : found[1]]


def encodable(text: str) -> bool:
    """Whether a wire can carry it: escapes in JSON can spell half a surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
