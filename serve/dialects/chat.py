"""OpenAI Chat Completions, both ways, not streamed.

Invariants:
- Unknown fields never break a run; what this form cannot honour (streams, tools, images, n above 1) is refused with a
  plain sentence and status 400 in OpenAI's error shape.
- Sampling fields are read by nobody: the session's sampling is law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from headrace.serve.conversation import Message, Role, TurnRequest
from headrace.serve.errors import BadRequest, InfraError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.serve.conversation import TurnAnswer
    from headrace.serve.errors import WireError

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """`model` is echoed: any name is served by the policy."""

    turn: TurnRequest
    model: str


def parse(body: bytes) -> ChatRequest:
    """Read a request body. Raises BadRequest, whose `field` names the JSON path at fault."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.")
    _refuse_unavailable(document)
    model = document.get("model", "")
    if not isinstance(model, str):
        raise BadRequest("model must be a string.", "model")
    turn = TurnRequest(
        messages=_messages(document.get("messages")), max_tokens=_max_tokens(document), stop=_stop(document)
    )
    return ChatRequest(turn=turn, model=model or "policy")


def _refuse_unavailable(document: Mapping[str, object]) -> None:
    if document.get("stream"):
        raise BadRequest("Streaming is not available yet; send stream: false.", "stream")
    if document.get("n") not in (None, 1):
        raise BadRequest("n must be 1: one answer per request.", "n")
    if document.get("tools") or document.get("functions"):
        raise BadRequest("Tool calls are not available yet; send no tools and read commands from the text.", "tools")


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message.", "messages")
    messages = tuple(_message(entry, f"messages[{index}]") for index, entry in enumerate(value))
    if messages[-1].role is Role.ASSISTANT:
        raise BadRequest(
            "The last message must not be the assistant's: prefilled answers are not available.", "messages"
        )
    return messages


def _message(entry: object, where: str) -> Message:
    if not isinstance(entry, dict):
        raise BadRequest(f"{where} must be an object with role and content.", where)
    role = entry.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(_ROLES))}.", f"{where}.role")
    if entry.get("tool_calls"):
        raise BadRequest(f"{where}.tool_calls: tool calls are not available yet.", f"{where}.tool_calls")
    return Message(role=_ROLES[role], content=_content(entry.get("content"), f"{where}.content"))


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of text parts.", where)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where} may hold text parts only: this model reads no images, audio or files.", where)
        texts.append(part["text"])
    return "".join(texts)


def _max_tokens(document: Mapping[str, object]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = document.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"{name} must be a whole number of at least 1.", name)
        return value
    return None


def _stop(document: Mapping[str, object]) -> tuple[str, ...]:
    value = document.get("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings.", "stop")
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in strings):
        raise BadRequest(f"A stop string has 1 to {MAX_STOP_CHARACTERS} characters.", "stop")
    return tuple(strings)


def answer(request: ChatRequest, turn: TurnAnswer, *, answer_id: str, created_s: int) -> dict[str, object]:
    """The `chat.completion` object."""
    return {
        "id": f"chatcmpl-{answer_id}",
        "object": "chat.completion",
        "created": created_s,
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": turn.text, "refusal": None},
                "finish_reason": turn.end.value,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
        },
    }


def models(created_s: int) -> dict[str, object]:
    """`GET /v1/models`: one name stands for all, every name is accepted."""
    return {
        "object": "list",
        "data": [{"id": "policy", "object": "model", "created": created_s, "owned_by": "headrace"}],
    }


def error(failure: WireError) -> dict[str, object]:
    """OpenAI's error shape."""
    kind = "server_error" if isinstance(failure, InfraError) else "invalid_request_error"
    return {"error": {"message": str(failure), "type": kind, "param": failure.field, "code": failure.code}}
