"""What the two wires of OpenAI share: error bodies and the list of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.dialects import fields
from headrace.serve.errors import ContextExceeded, GatewayBroken, InfraError

if TYPE_CHECKING:
    from headrace.serve.errors import WireError


def status(failure: WireError) -> int:
    """Clients try 500 and 503 again, at other intervals."""
    if isinstance(failure, InfraError) and not isinstance(failure, GatewayBroken):
        return 503
    return failure.status


def error(failure: WireError) -> dict[str, object]:
    kind = "server_error" if isinstance(failure, InfraError) else "invalid_request_error"
    return {"error": {"message": sentence(failure), "type": kind, "param": failure.field, "code": failure.code}}


def sentence(failure: WireError) -> str:
    """Some clients know a full context by OpenAI's wording alone, not by its code."""
    if isinstance(failure, ContextExceeded):
        tokens = max(failure.tokens or 0, failure.limit + 1)
        return (
            f"This model's maximum context length is {failure.limit} tokens. However, your messages resulted in "
            f"{tokens} tokens. Please reduce the length of the messages."
        )
    return failure.told


def models(created_s: int) -> dict[str, object]:
    model = {"id": fields.DEFAULT_MODEL, "object": "model", "created": created_s, "owned_by": "headrace"}
    return {"object": "list", "data": [model]}
