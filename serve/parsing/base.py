"""The contract of an output parser.

Invariants:
- A parser is a view: whatever it makes of a text, the sampled ids stay what they are.
- What is no well-formed call stays text, in its place; nothing of the sampled text is lost or invented but blanks
  around markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from headrace.serve.conversation import Reasoning, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.serve.conversation import ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call without an id yet. `arguments` is JSON text of an object."""

    name: str
    arguments: str


ParsedBlock: TypeAlias = Text | Reasoning | ParsedCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """`blocks` in the order sampled, none of them empty. A well-formed call of a tool nobody offered is a call: agents
    tell the policy so themselves. `lost_calls` counts call markup that gave no call (broken, cut): the alarm for a
    parser that does not fit its model."""

    blocks: tuple[ParsedBlock, ...]
    lost_calls: int = 0


class OutputParser(Protocol):
    """Stateless."""

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        """Read a whole output (without its stop token). Without `tools` calls stay text. `in_reasoning`: the prompt
        opened the reasoning already."""
        ...
