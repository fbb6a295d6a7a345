"""Calls as Qwen3-Coder writes them: <function=NAME> with <parameter=KEY> elements, inside <tool_call> or without it.

Invariants:
- A value is what stands between its tags, without the one line end beside each. What type it has, the tool's schema
  says; a value that is not of its type stays a string, so that the agent can say what is wrong with it.
- Tags inside a value are text as long as the value's own closing tag is followed by the next element.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.serve.parsing.base import ParsedCall
from headrace.serve.parsing.json_spans import encodable
from headrace.serve.parsing.scanner import NOTHING, Found, scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.serve.conversation import ToolSpec
    from headrace.serve.parsing.base import ParsedOutput

_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_UNCLOSED_END = re.compile(r"(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>(?:\s*</tool_call>)?")


class Qwen3CoderParser:
    """Implements `base.OutputParser`."""

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        return scan(text, _Markup(tools) if tools else None, in_reasoning=in_reasoning)


class _Markup:
    """Implements `scanning.CallMarkup` for the tools of one request."""

    opening = r"<tool_call>\s*(?:<function=)?|<function="
    closing = r"</tool_call>"
    wrapping = NOTHING
    begins = r"[^<>\n]+>|\s*<function="

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._types = {tool.name: _types_of(tool.parameters) for tool in tools}

    def read(self, text: str, start: int) -> Found | None:
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
            arguments[key] = _typed(_value(text[element.end() : found.start()]), types.get(key, frozenset({"string"})))
            position = found.end()
        closed = _FUNCTION_END.match(text, position)
        if closed is None or not name:
            return None
        return Found((ParsedCall(name, _json(arguments)),), closed.end())


def _value(text: str) -> str:
    text = text.removeprefix("\n")
    return text.removesuffix("\n")


def _types_of(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """JSON types by parameter."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): frozenset(_types(value)) or frozenset({"string"}) for key, value in properties.items()}


def _types(schema: object) -> set[str]:
    """Types that a schema allows; none where it does not say."""
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
    """The value that the text spells in one of the types; the text itself where it spells none."""
    wanted = types - {"string"}
    if not wanted:
        return text
    spelled = text.strip()
    if spelled.lower() in {"true", "false", "null", "none"}:
        value: Any = {"true": True, "false": False}.get(spelled.lower())
    else:
        value = _spelled(spelled, literals=bool(wanted & {"object", "array"}))
    fits = any(type(value) in _KINDS.get(name, ()) for name in wanted)
    if value is None:
        fits = "string" not in types or "null" in types
    return value if fits else text


def _spelled(text: str, *, literals: bool) -> Any:
    """What JSON, or for containers a Python literal as well, makes of a text; the text where it is neither."""
    for read in (json.loads, ast.literal_eval) if literals else (json.loads,):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return text


def _json(arguments: dict[str, Any]) -> str:
    """JSON text; half surrogates, which the wires do not take, stay escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if encodable(text) else json.dumps(arguments)
