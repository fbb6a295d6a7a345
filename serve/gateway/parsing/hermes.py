"""Parser for the calls of Hermes, Qwen2.5 and Qwen3: a JSON object between <tool_call> and </tool_call>.

Invariant: a call's arguments are exactly the text that was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from headrace.serve.gateway.conversation import ToolSpec
from headrace.serve.gateway.parsing.base import CallSyntax, ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.json_spans import after_blanks, encodable, object_text, read_object
from headrace.serve.gateway.parsing.scanner import NOTHING, ScannedCalls, scan

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def _begin(name: str) -> str:
    return f'{OPENING}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


class HermesParser:
    """Implements `base.OutputParser`."""

    call_syntax = CallSyntax(begin=_begin, end=f"}}\n{CLOSING}")
    opening = re.escape(OPENING)
    closing = re.escape(CLOSING)
    wrapping = NOTHING
    begins = r"\s*\{"

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        return scan(text, self if tools else None, in_reasoning=in_reasoning)

    def read(self, text: str, start: int) -> ScannedCalls | None:
        found = read_object(text, after_blanks(text, start + len(OPENING)))
        if found is None:
            return None
        fields, end = found
        edge = after_blanks(text, end)
        if text.startswith(CLOSING, edge):
            end = edge + len(CLOSING)
        elif edge < len(text) and not text.startswith(OPENING, edge):
            # A call without its closing tag is valid only at the end, or directly before the next call.
            return None
        name = fields["name"].value if "name" in fields else None
        given = fields.get("arguments") or fields.get("parameters")
        arguments: str | None = "{}"
        if given is not None and given.value is not None:
            arguments = given.text if isinstance(given.value, dict) else None
            if isinstance(given.value, str):
                arguments = object_text(given.value)
        if not isinstance(name, str) or not name or arguments is None or not encodable(name + arguments):
            return None
        return ScannedCalls((ParsedCall(name, arguments),), end)
