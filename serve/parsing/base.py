"""The interface of an output parser.

Invariants:
- A parser is a view: its result never changes the sampled ids.
- Anything but a well-formed call remains text, in its place; nothing of the sampled text is lost or invented but
  whitespace around markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headrace.serve.conversation import Reasoning, Text, ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """Call that has no id yet. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


ParsedBlock: TypeAlias = Text | Reasoning | ParsedCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Parsed output: `blocks` in the order sampled, none of them empty. A well-formed call of an unknown tool is a
    call, since agents report that to the policy themselves. `lost_calls` counts call markup that is malformed or cut,
    for the alarm about a parser that does not fit its model."""

    blocks: tuple[ParsedBlock, ...]
    lost_calls: int = 0


class OutputParser(Protocol):
    """Stateless parser of sampled outputs."""

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        """Parse a whole output (without its stop token). Without `tools`, calls remain text. `in_reasoning`: the prompt
        already opened the reasoning."""
        ...
