"""Choice of the parser for a model's outputs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Final

from headrace.serve.gateway.conversation import ToolSpec
from headrace.serve.gateway.errors import ParserUnknown
from headrace.serve.gateway.parsing.base import CallSyntax, OutputParser, ParsedOutput
from headrace.serve.gateway.parsing.hermes import HermesParser
from headrace.serve.gateway.parsing.qwen3_coder import Qwen3CoderParser
from headrace.serve.gateway.parsing.scanner import scan
from headrace.serve.gateway.parsing.sglang_parsers import SGLANG, SGLangParser


class PlainParser:
    """Parser for outputs without calls, which finds only reasoning and text. Implements `base.OutputParser`."""

    call_syntax: CallSyntax | None = None

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        del tools
        return scan(text, None, in_reasoning=in_reasoning)


_OURS: dict[str, Callable[[], OutputParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "none": PlainParser,
}
_SIGNS = (
    (r"<function=", "qwen3_coder"),
    (r"<arg_key>.*['\"]<tool_call>['\"]\s*[+~]|['\"]<tool_call>['\"]\s*[+~].*<arg_key>", f"{SGLANG}glm47"),
    (r"<arg_key>", f"{SGLANG}glm45"),
    (r"<tool_call>", "hermes"),
    ("\uff5cDSML\uff5cfunction_calls", f"{SGLANG}deepseekv32"),
    ("\uff5cDSML\uff5ctool_calls", f"{SGLANG}deepseekv4"),
    (
        "<\uff5ctool\u2581calls\u2581begin\uff5c>.*```json|```json.*<\uff5ctool\u2581calls\u2581begin\uff5c>",
        f"{SGLANG}deepseekv3",
    ),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", f"{SGLANG}deepseekv31"),
    (r"<\|tool_calls_section_begin\|>", f"{SGLANG}kimi_k2"),
    (r"<\|channel\|>", f"{SGLANG}gpt-oss"),
    (r"<\|python_tag\|>|ipython", f"{SGLANG}llama3"),
    (r"\[TOOL_CALLS\]", f"{SGLANG}mistral"),
)
"""Patterns that identify the call markup in a template's text; the first match decides."""


def choose_parser(name: str, template_text: str) -> OutputParser:
    """Return the parser for `name`: auto (by the call markup in the chat template), hermes, qwen3_coder, none, or
    sglang:NAME. If a template has no call markup, its tools are rendered in the Hermes format (template_messages.py),
    so auto means hermes.

    Raises:
        ParserUnknown: there is no such parser.
        ParserMissing: the parser is one of SGLang's, and SGLang is not installed.
    """
    if name == "auto":
        name = next((parser for sign, parser in _SIGNS if re.search(sign, template_text, re.DOTALL)), "hermes")
    if name.startswith(SGLANG):
        return SGLangParser(name.removeprefix(SGLANG))
    if name not in _OURS:
        raise ParserUnknown(f"gateway.parser: no parser {name!r}; set it to auto, {', '.join(_OURS)} or {SGLANG}NAME")
    return _OURS[name]()


logger = logging.getLogger(__name__)

BATCH_TURNS: Final = 32
"""Number of turns with call markup that are judged together."""


class ParserAlarm:
    """Alarm for a parser that does not match its model, judged in batches of turns. `raised` is true if no call was
    parsed in the last full batch of turns with call markup. The start of each alarm is logged."""

    def __init__(self) -> None:
        self.raised = False
        self._turns = 0
        self._read = 0

    def saw(self, *, calls: int, lost_calls: int) -> None:
        """Count a turn with `calls` parsed calls and `lost_calls` pieces of call markup that could not be parsed."""
        if not calls and not lost_calls:
            return
        self._turns += 1
        self._read += calls
        if self._turns < BATCH_TURNS:
            return
        raised, self._turns, self._read = self._read == 0, 0, 0
        if raised and not self.raised:
            logger.error(
                "%d turns had call markup and no call could be parsed: set gateway.parser to the model's parser",
                BATCH_TURNS,
            )
        self.raised = raised
