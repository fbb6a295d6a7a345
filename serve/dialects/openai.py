"""The error bodies and the model list that OpenAI's two APIs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.dialects import fields
from headrace.serve.errors import ContextExceeded, GatewayBroken, InfraError

if TYPE_CHECKING:
    from headrace.serve.errors import WireError


def status(failure: WireError) -> int:
    # Clients retry 503 and 500, at different intervals.
    if isinstance(failure, InfraError) and not isinstance(failure, GatewayBroken):
        return 503
    return failure.status


def error(failure: WireError) -> dict[str, object]:
    kind = "server_error" if isinstance(failure, InfraError) else "invalid_request_error"
    return {"error": {"message": sentence(failure), "type": kind, "param": failure.field, "code": failure.code}}


def sentence(failure: WireError) -> str:
    """Return the message for the agent."""
    if isinstance(failure, ContextExceeded):
        # Some clients recognise an exceeded context by OpenAI's wording only, not by its code.
        tokens = max(failure.tokens or 0, failure.limit + 1)
        return (
            f"This model's maximum context length is {failure.limit} tokens. However, your messages resulted in "
            f"{tokens} tokens. Please reduce the length of the messages."
        )
    return failure.public_message


def models(created_s: int) -> dict[str, object]:
    model = {"id": fields.DEFAULT_MODEL, "object": "model", "created": created_s, "owned_by": "headrace"}
    return {"object": "list", "data": [model]}
