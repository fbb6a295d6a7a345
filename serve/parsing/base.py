"""The interface of an output parser.

Invariants:
- A parser is a view: its result never changes the sampled ids.
- Anything except a well-formed call remains text at its original position; no sampled text is lost or invented, except
  whitespace around markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headrace.serve.conversation import Reasoning, Text, ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """Parsed call, which does not have an id yet. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


ParsedBlock: TypeAlias = Text | Reasoning | ParsedCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Parsed output: `blocks` are in the order sampled, and none of them is empty. A well-formed call to an unknown
    tool is a call, since agents report the error to the policy themselves. `lost_calls` counts pieces of call markup
    that are malformed or cut off, for the alarm about a parser that does not match its model."""

    blocks: tuple[ParsedBlock, ...]
    lost_calls: int = 0


class OutputParser(Protocol):
    """Stateless parser for sampled outputs."""

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        """Parse a whole output (without its stop token). Without `tools`, calls remain text. `in_reasoning` means that
        the prompt has already opened the reasoning."""
        ...
