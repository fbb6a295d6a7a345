"""The interface of an output parser.

Invariants:
- A parser is a view: its result never changes the sampled ids.
- Anything except a well-formed call remains text at its original position; no sampled text is lost or invented, except
  whitespace around markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headrace.serve.gateway.conversation import Reasoning, Text, ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """Parsed call, which does not have an id yet. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Spelling of calls, for grammars: `begin` returns what precedes the arguments of a call to the named tool, and
    `end` follows them. `style` is that of the arguments in XGrammar's structural tags: `json` or `qwen_xml`."""

    begin: Callable[[str], str]
    end: str
    style: str = "json"
    separator: str = "\n"


ParsedBlock: TypeAlias = Text | Reasoning | ParsedCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Parsed output: `blocks` are in the order sampled, and none of them is empty. A well-formed call to an unknown
    tool is a call, since agents report the error to the policy themselves. `lost_calls` counts pieces of call markup
    that are malformed or cut off, for the alarm about a parser that does not match its model."""

    blocks: tuple[ParsedBlock, ...]
    lost_calls: int = 0


class OutputParser(Protocol):
    """Stateless parser for sampled outputs. `call_syntax` is a spelling of calls that it parses; None if it is not
    known, so that no grammar can force a call."""

    @property
    def call_syntax(self) -> CallSyntax | None: ...

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        """Parse a whole output (without its stop token). Without `tools`, calls remain text. `in_reasoning` means that
        the prompt has already opened the reasoning."""
