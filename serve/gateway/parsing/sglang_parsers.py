"""Adapter for SGLang's parsers, for model families that headrace has no parser for.

Invariants:
- SGLang is imported only when one of its parsers is requested.
- Its parsers get one call at a time if we know the family's tags, since they drop text that follows a call and text
  that they cannot read. Text that they drop remains text, at its original position.
- Reasoning between <think> tags is parsed by our own code; for families with other tags, it is parsed by SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from headrace.serve.gateway.conversation import Reasoning, Text, ToolSpec
from headrace.serve.gateway.errors import ParserMissing, ParserUnknown
from headrace.serve.gateway.parsing.base import CallSyntax, ParsedBlock, ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.json_spans import encodable, object_text
from headrace.serve.gateway.parsing.scanner import NOTHING, THINK, ScannedCalls, scan

SGLANG = "sglang:"
"""Prefix that selects SGLang's parsers in `gateway.parser`."""


@dataclass(frozen=True, slots=True)
class _Tags:
    """Tags around a single call and around a group of calls."""

    opening: str
    closing: str
    before: str = ""
    after: str = ""


_BAR, _GAP = "\uff5c", "\u2581"  # characters in DeepSeek's tokens


def _deepseek(name: str, edge: str) -> str:
    return f"<{_BAR}tool{_GAP}{name}{_GAP}{edge}{_BAR}>"


_GLM = _Tags("<tool_call>", "</tool_call>")
_DEEPSEEK = _Tags(
    _deepseek("call", "begin"), _deepseek("call", "end"), _deepseek("calls", "begin"), _deepseek("calls", "end")
)
_KIMI = _Tags("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_TAGS = {"glm": _GLM, "glm45": _GLM, "glm47": _GLM, "deepseekv3": _DEEPSEEK, "deepseekv31": _DEEPSEEK, "kimi_k2": _KIMI}


class SGLangParser:
    """Implements `base.OutputParser` with SGLang's `FunctionCallParser` and `ReasoningParser`. `name` is a value of
    `--tool-call-parser`; if its family has its own reasoning tags, the `--reasoning-parser` of the same name is used as
    well.

    Raises:
        ParserMissing: SGLang cannot be imported; the message says how to install it.
        ParserUnknown: SGLang has no parser of this name.
    """

    call_syntax: CallSyntax | None = None

    def __init__(self, name: str) -> None:
        self._sglang = _SGLang(name)
        self._tags = _TAGS.get(name)

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        if self._tags and tools:
            return scan(text, _Markup(self._sglang, self._tags, tools), in_reasoning=in_reasoning)
        if self._sglang.reasons:
            thought, rest = self._sglang.reasoning(text, in_reasoning=in_reasoning)
            blocks: list[ParsedBlock] = [Reasoning(thought)] if thought else []
            blocks.extend([Text(rest)] if rest else [])
        else:
            blocks = list(scan(text, None, in_reasoning=in_reasoning).blocks)
        found: list[ParsedBlock] = []
        lost = 0
        for block in blocks:
            if tools and isinstance(block, Text):
                parsed = self._sglang.whole(block.text, tools)
                found.extend(parsed.blocks)
                lost += parsed.lost_calls
            else:
                found.append(block)
        return ParsedOutput(tuple(found), lost)


class _Markup:
    """Implements `scanner.CallMarkup` for the tools of one request."""

    begins = ""

    def __init__(self, sglang: _SGLang, tags: _Tags, tools: Sequence[ToolSpec]) -> None:
        self._sglang = sglang
        self._tags = tags
        self._tools = tools
        self.opening, self.closing = re.escape(tags.opening), re.escape(tags.closing)
        self.wrapping = "|".join(map(re.escape, (tags.before, tags.after))) if tags.before else NOTHING

    def read(self, text: str, start: int) -> ScannedCalls | None:
        closing = text.find(self._tags.closing, start)
        if closing < 0:
            return None
        end = closing + len(self._tags.closing)
        _, calls = self._sglang.calls(f"{self._tags.before}{text[start:end]}{self._tags.after}", self._tools)
        return ScannedCalls(calls, end) if calls else None


class _SGLang:
    """SGLang's imported parsers. Their detectors are stateful, so new ones are created for each text."""

    def __init__(self, name: str) -> None:
        try:
            from sglang.srt.entrypoints.openai.protocol import Function, Tool
            from sglang.srt.environ import envs
            from sglang.srt.function_call.function_call_parser import FunctionCallParser
            from sglang.srt.parser.reasoning_parser import ReasoningParser
        except ImportError as error:
            raise ParserMissing(
                f"gateway.parser: {SGLANG}{name} needs SGLang, which cannot be imported here ({error}); "
                "install it beside the gateway (pip install sglang), or set gateway.parser to hermes, qwen3_coder "
                "or none"
            ) from error
        if name not in FunctionCallParser.ToolCallParserEnum:
            known = ", ".join(sorted(FunctionCallParser.ToolCallParserEnum))
            raise ParserUnknown(f"gateway.parser: SGLang has no parser {name!r}; it has {known}")
        self._name = name
        self._tool, self._function = Tool, Function
        self._calls, self._reasoning = FunctionCallParser, ReasoningParser
        self._unknown_tools = getattr(envs, "SGLANG_FORWARD_UNKNOWN_TOOLS", None)
        self.reasons = name in ReasoningParser.DetectorMap and (
            str(getattr(ReasoningParser(name).detector, "think_start_token", THINK)) != THINK
        )
        """True when the family has its own reasoning tags."""

    def reasoning(self, text: str, *, in_reasoning: bool) -> tuple[str, str]:
        """Return the reasoning and the rest of the text."""
        try:
            parser = self._reasoning(self._name, force_reasoning=True) if in_reasoning else self._reasoning(self._name)
            thought, rest = parser.parse_non_stream(text)
        except Exception:  # noqa: BLE001 - a parser that fails on an output must not fail the turn
            return "", text
        return (thought or "").strip(), rest or ""

    def calls(self, text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[ParsedCall]]:
        """Return the rest of the text and the well-formed calls in it, including calls to unknown tools if this version
        of SGLang supports that."""
        parser = self._calls([self._offered(tool) for tool in tools], self._name)
        with self._unknown_tools.override(True) if self._unknown_tools is not None else nullcontext():
            try:
                rest, items = parser.parse_non_stream(text)
            except Exception:  # noqa: BLE001 - a parser that fails on an output must not fail the turn
                return text, []
        calls = [
            ParsedCall(item.name, arguments)
            for item in items
            if item.name and encodable(item.name) and (arguments := object_text(item.parameters or "{}"))
        ]
        return rest or "", [call for call in calls if encodable(call.arguments)]

    def whole(self, text: str, tools: Sequence[ToolSpec]) -> ParsedOutput:
        """Return the text and calls for a family whose call tags we do not know: the text, the calls, and then any text
        after the last call tag that is in neither of them."""
        detector = self._calls([self._offered(tool) for tool in tools], self._name).detector
        rest, calls = self.calls(text, tools)
        if not calls:
            return ParsedOutput((Text(text),), int(detector.has_tool_call(text)))
        marks = text.count(detector.bot_token) if detector.bot_token else 0
        tail = text.rpartition(detector.eot_token)[2].strip() if detector.eot_token else ""
        blocks: list[ParsedBlock] = [Text(rest)] if rest.strip() else []
        blocks.extend(calls)
        if tail and tail != text.strip() and tail not in rest:
            blocks.append(Text(tail))
        return ParsedOutput(tuple(blocks), max(0, marks - len(calls)))

    def _offered(self, tool: ToolSpec) -> Any:
        function = self._function(name=tool.name, description=tool.description, parameters=dict(tool.parameters))
        return self._tool(type="function", function=function)
