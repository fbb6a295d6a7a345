"""Parser for Qwen3-Coder's calls: <function=NAME> with <parameter=KEY> elements, optionally inside <tool_call>.

Invariants:
- A value is the text between its tags, without one line break next to each tag. Its type comes from the tool's schema;
  a value that does not have that type remains a string, so that the agent can report the mistake.
- Tags inside a value are text as long as the value's own closing tag is followed by the next element.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.serve.gateway.conversation import ToolSpec
from headrace.serve.gateway.parsing.base import CallSyntax, ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.json_spans import encodable
from headrace.serve.gateway.parsing.scanner import NOTHING, ScannedCalls, scan

_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_UNCLOSED_END = re.compile(r"(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>(?:\s*</tool_call>)?")


class Qwen3CoderParser:
    """Implements `base.OutputParser`."""

    call_syntax = CallSyntax(
        begin="<tool_call>\n<function={}>\n".format, end="</function>\n</tool_call>", style="qwen_xml"
    )

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        return scan(text, _Markup(tools) if tools else None, in_reasoning=in_reasoning)


class _Markup:
    """Implements `scanner.CallMarkup` for the tools of one request."""

    opening = r"<tool_call>\s*(?:<function=)?|<function="
    closing = r"</tool_call>"
    wrapping = NOTHING
    begins = r"[^<>\n]+>|\s*<function="

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._types: dict[str, dict[str, frozenset[str]]] = {}
        for tool in tools:
            properties = tool.parameters.get("properties")
            known = properties.items() if isinstance(properties, Mapping) else ()
            self._types[tool.name] = {str(key): frozenset(_types(value) or {"string"}) for key, value in known}

    def read(self, text: str, start: int) -> ScannedCalls | None:
        opened = _FUNCTION.match(text, start)
        if opened is None or text.find("</function>", opened.end()) < 0:
            return None
        name, position = opened[1].strip(), opened.end()
        types, arguments = self._types.get(name, {}), {}
        while element := _PARAMETER.match(text, position):
            key = element[1].strip()
            found = _VALUE_END.search(text, element.end()) or _UNCLOSED_END.search(text, element.end())
            if found is None:
                return None
            value = text[element.end() : found.start()].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, types.get(key, frozenset({"string"})))
            position = found.end()
        closed = _FUNCTION_END.match(text, position)
        if closed is None or not name:
            return None
        spelled = json.dumps(arguments, ensure_ascii=False)
        # Lone surrogates, which the dialects cannot send, remain escaped.
        return ScannedCalls((ParsedCall(name, spelled if encodable(spelled) else json.dumps(arguments)),), closed.end())


def _types(schema: object) -> set[str]:
    """Return the types that a schema allows; an empty set if it does not specify any."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {name for name in named or () if isinstance(name, str)}
    for choice in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(choice) or ():
            found |= _types(part)
    if not found and isinstance(schema.get("enum"), list | tuple):
        kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
        found = {kinds[type(value)] for value in schema["enum"] if type(value) in kinds}
    return found


_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def _typed(text: str, types: frozenset[str]) -> Any:
    """Return the text converted to one of the types; the text itself if it is not valid for any of them."""
    wanted = types - {"string"}
    if not wanted:
        return text
    spelled = text.strip()
    value: Any = spelled
    if spelled.lower() in {"true", "false", "null", "none"}:
        value = {"true": True, "false": False}.get(spelled.lower())
    else:
        # JSON, or for containers a Python literal as well.
        for read in (json.loads, ast.literal_eval) if wanted & {"object", "array"} else (json.loads,):
            try:
                found = read(spelled)
                json.dumps(found, allow_nan=False)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            value = found
            break
    fits = any(type(value) in _KINDS.get(name, ()) for name in wanted)
    if value is None:
        fits = "string" not in types or "null" in types
    return value if fits else text
