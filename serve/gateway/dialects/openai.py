"""Server-sent events of the dialects, and the error bodies and model list that OpenAI's two APIs share.

Invariants:
- An event is one line of data, whatever text it contains, even for readers that split lines at Unicode line separators.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from headrace.serve.gateway.dialects import fields
from headrace.serve.gateway.errors import ContextExceeded, GatewayBroken, InfraError, TooManyRequests, WireError


def status(failure: WireError) -> int:
    # Clients retry 503 and 500, at different intervals.
    if isinstance(failure, InfraError) and not isinstance(failure, GatewayBroken):
        return 503
    return failure.status


def error(failure: WireError) -> dict[str, object]:
    kind = "server_error" if isinstance(failure, InfraError) else "invalid_request_error"
    if isinstance(failure, TooManyRequests):
        # OpenAI's word for the kind of limit that was reached.
        kind = "requests"
    return {"error": {"message": sentence(failure), "type": kind, "param": failure.field, "code": failure.code}}


def sentence(failure: WireError) -> str:
    """Return the failure's message for the agent."""
    if isinstance(failure, ContextExceeded):
        # Some clients recognise an exceeded context by OpenAI's wording only, not by its code.
        tokens = max(failure.tokens or 0, failure.limit + 1)
        return (
            f"This model's maximum context length is {failure.limit} tokens. However, your messages resulted in "
            f"{tokens} tokens. Please reduce the length of the messages."
        )
    return failure.public_message


def model(name: str, created_s: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "headrace"}


def models(created_s: int) -> dict[str, object]:
    return {"object": "list", "data": [model(fields.DEFAULT_MODEL, created_s)]}


COMMENT = b": ping\n\n"
"""Comment line, which every event reader ignores."""
DONE = b"data: [DONE]\n\n"
# Line ends of Python's splitlines, which HTTP libraries use. JSON itself escapes the others, below 0x20.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def data(document: Mapping[str, object]) -> bytes:
    """Return an event without a name."""
    line = orjson.dumps(document)
    for raw, escaped in _LINE_ENDS:
        line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


def event(document: Mapping[str, object]) -> bytes:
    """Return an event named after the document's `type`."""
    return f"event: {document['type']}\n".encode() + data(document)
