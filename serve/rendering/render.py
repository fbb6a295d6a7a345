"""From messages to token ids: what a session needs of a tokenizer and its chat template, and nothing more.

Invariants:
- `render` ends where the policy begins to speak.
- `bridge` closes the sampled turn if it did not close itself, renders only the new messages and opens the next turn:
  history plus bridge is what the session sends, and history is never rendered again.
- Contents are text: markup inside a message never becomes a control token.
- System messages after the first are folded the same way every time: a conversation that grows only appends tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from headrace.serve.conversation import Message, ToolCall, ToolSpec

TokenIds: TypeAlias = "array[int]"
"""Array of the type code `i` (int32)."""


class Renderer(Protocol):
    """Pure functions of their arguments (caches aside). Ids, also those that the policy may sample, are in
    `[0, vocab_size)`; `stop_ids` end a turn of the policy."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def template(self) -> str:
        """The chat template's own text."""
        ...

    @property
    def bridges(self) -> bool:
        """Whether the template's turns can be appended to a history that is not rendered again (probed at start)."""
        ...

    @property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt itself opens the reasoning (`<think>`), so that an output begins inside it."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> TokenIds:
        """All ids of the conversation up to where the policy speaks. Raises TemplateRefused."""
        ...

    def bridge(self, last_id: int, calls: Sequence[ToolCall], messages: Sequence[Message]) -> TokenIds:
        """Ids between the last sampled id (`last_id`; a stop id, unless the turn was cut) and the next one. `calls`
        are those of the sampled turn, for templates that name them beside the results. Only where `bridges`. Raises
        TemplateRefused."""
        ...

    def count_tokens(self, texts: Iterable[str], *, stop_at: int) -> int:
        """Tokens of the texts alone, without a template; counting ends at about `stop_at`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens as they are spelled; bytes that are no UTF-8 become U+FFFD."""
        ...

    def visible(self, text: str) -> str:
        """Text without the spelling of special tokens."""
        ...
