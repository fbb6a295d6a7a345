"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and `<think>...</think>`: Qwen2.5, Qwen3, Hermes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import orjson

from headrace.serve.conversation import Reasoning, Text
from headrace.serve.parsing.base import ParsedBlock, ParsedCall, ParsedOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.serve.conversation import ToolSpec

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class HermesParser:
    """See the module."""

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        reasoning, rest = split_reasoning(text, in_reasoning=in_reasoning)
        blocks: list[ParsedBlock] = [Reasoning(reasoning)] if reasoning.strip() else []
        if not tools:
            return ParsedOutput((*blocks, Text(rest)) if rest else tuple(blocks))
        lost, at = 0, 0
        for found in _CALL.finditer(rest):
            call = _call(found[1])
            if call is None:
                lost += 1
                continue
            if (between := rest[at : found.start()]).strip():
                blocks.append(Text(between.strip()))
            blocks.append(call)
            at = found.end()
        if rest[at:].strip():
            blocks.append(Text(rest[at:].strip()))
        return ParsedOutput(tuple(blocks), lost)


def split_reasoning(text: str, *, in_reasoning: bool) -> tuple[str, str]:
    """Reasoning and the rest."""
    if text.lstrip().startswith("<think>"):
        text, in_reasoning = text.lstrip().removeprefix("<think>"), True
    before, closing, after = text.partition("</think>")
    if closing:
        return before.strip("\n"), after.lstrip("\n")
    return (text, "") if in_reasoning else ("", text)


def _call(body: str) -> ParsedCall | None:
    try:
        given = orjson.loads(body)
        name, arguments = given["name"], given.get("arguments", {})
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, orjson.dumps(arguments).decode())
