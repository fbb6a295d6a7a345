"""Reader for JSON objects inside a text that also returns the source text of each value.

Invariant: only standard JSON is accepted: no NaN, no unescaped line breaks in strings, no trailing comma.
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
    """Return 0 for every number: the values are not used, and an int with 5,000 digits would raise an error."""
    del number
    return 0


_DECODER = json.JSONDecoder(parse_int=_unread, parse_float=_unread, parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class Value:
    """JSON value (numbers are 0) with its source text."""

    value: Any
    text: str


def after_blanks(text: str, start: int) -> int:
    found = _BLANKS.match(text, start)
    return found.end() if found else start


def read_object(text: str, start: int) -> tuple[dict[str, Value], int] | None:
    """Return the fields of the object that begins at `start`, and the position of its end; None if there is no complete
    object."""
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
    """Return the text without surrounding whitespace if it is a JSON object, else None."""
    start = after_blanks(text, 0)
    found = read_object(text, start)
    if found is None or after_blanks(text, found[1]) != len(text):
        return None
    return text[start : found[1]]


def encodable(text: str) -> bool:
    """Return whether the text can be sent as UTF-8: JSON escapes can contain a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
