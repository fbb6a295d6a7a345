"""Client-side parsers of the APIs' streams, written from the vendors' documentation, not from the dialects."""

from __future__ import annotations

import json
from typing import Any


def read_events(stream: bytes) -> list[tuple[str, Any]]:
    """Name ("" without one) and data of every event; "[DONE]" stays text. Comments are skipped, lines end as Unicode
    says."""
    text = stream.decode()
    assert text.endswith("\n\n")
    found = []
    for chunk in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in chunk.splitlines() if not line.startswith(":")]
        if not lines:
            continue
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else ""
        (line,) = lines
        data = line.removeprefix("data: ")
        found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


def fold_anthropic(stream: bytes) -> dict[str, Any]:
    """The message a client has at the end of a stream. `input` of a call is parsed as Claude Code does it."""
    events = read_events(stream)
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events][-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = {}
    raw = ""
    for name, data in events:
        if name == "message_start":
            assert not message
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            raw = ""
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            raw += _grow(message["content"][data["index"]], data["delta"])
        elif name == "content_block_stop":
            block = message["content"][data["index"]]
            if block["type"] == "tool_use":
                block["input"] = _parsed(raw)
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
    return message


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> str:
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    kind = delta["type"]
    if kind == "input_json_delta":
        return str(delta["partial_json"])
    block[kinds[kind]] += delta[kinds[kind]]
    return ""


def _parsed(raw: str) -> Any:
    try:
        return json.loads(raw or "{}")
    except ValueError:
        return {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}


def fold_chat(stream: bytes) -> dict[str, Any]:
    """The `chat.completion` a client has at the end of a stream."""
    events = read_events(stream)
    assert events[-1] == ("", "[DONE]")
    message: dict[str, Any] = {"role": None, "content": None}
    folded: dict[str, Any] = {"usage": None, "finish_reason": None, "message": message}
    for name, data in events[:-1]:
        assert name == ""
        assert data["object"] == "chat.completion.chunk"
        folded |= {"id": data["id"], "model": data["model"], "usage": data.get("usage")}
        for choice in data["choices"]:
            assert folded["finish_reason"] is None
            folded["finish_reason"] = choice["finish_reason"]
            delta = choice["delta"]
            message["role"] = delta.get("role") or message["role"]
            for field in ("content", "reasoning_content"):
                if delta.get(field) is not None:
                    message[field] = (message.get(field) or "") + delta[field]
            if "function_call" in delta:
                assert "function_call" not in message
                message["function_call"] = delta["function_call"]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                assert call.pop("index") == len(calls)
                calls.append(call)
    return folded


def fold_responses(stream: bytes) -> dict[str, Any]:
    """The final response, after checking that its items are those that were announced, grown and finished."""
    events = read_events(stream)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    finished: list[dict[str, Any]] = []
    grown = ""
    for name, data in events[2:-1]:
        assert data["output_index"] == len(finished)
        if name == "response.output_item.added":
            grown = ""
        elif name.endswith(".delta"):
            grown += data["delta"]
        elif name == "response.output_item.done":
            assert grown == _content(data["item"])
            finished.append(data["item"])
    name, last = events[-1]
    assert name in ("response.completed", "response.incomplete", "response.failed")
    assert last["response"]["output"] == finished
    return dict(last["response"])


def _content(item: dict[str, Any]) -> str:
    if item["type"] == "message":
        return "".join(part["text"] for part in item["content"])
    if item["type"] == "reasoning":
        return "".join(part["text"] for part in item["summary"])
    return str(item["arguments"] if item["type"] == "function_call" else item["input"])


def read_refusal(wire: str, document: dict[str, Any], *, limited: bool = False) -> str:
    """Return the message of a refusal for an agent's error, in the form of its API. `limited`: it sent too much at
    once."""
    error = document["error"]
    if wire == "anthropic":
        assert document["type"] == "error"
        assert set(error) == {"type", "message"}
        usual = ("invalid_request_error", "request_too_large", "timeout_error")
        assert error["type"] in (("rate_limit_error",) if limited else usual)
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == ("requests" if limited else "invalid_request_error")
        assert (error["code"] == "rate_limit_exceeded") == limited
    message: str = error["message"]
    assert 10 < len(message) < 1000
    assert not any(word in message for word in ("Traceback", "Error(", "object at 0x"))
    return message
