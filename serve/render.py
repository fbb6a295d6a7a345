"""From messages to token ids: what a session needs of a tokenizer and its chat template, and nothing more.

Invariants:
- `render(messages)` ends where the policy begins to speak.
- `bridge` closes the sampled turn if it did not close itself, renders only the new messages and opens the next turn:
  history plus bridge is what the session sends, and history is never rendered again.
- Contents are text: markup inside a message never becomes a control token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.serve.conversation import Message


class Renderer(Protocol):
    """`policies.tokenizer.ChatTokenizer` is one. Ids are in `[0, vocab_size)`; `stop_ids` end a turn of the policy."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """All ids of the conversation up to where the policy speaks. Raises TemplateRefused."""
        ...

    def bridge(self, last_id: int, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids between the last sampled id (`last_id`; a stop id, unless the turn was cut) and the next one. Raises
        TemplateRefused."""
        ...


def load_renderer(tokenizer_dir: Path) -> Renderer:
    """The renderer of a model directory. Raises TokenizerInvalid that names the file."""
    from headrace.policies.tokenizer import ChatTokenizer

    return ChatTokenizer(tokenizer_dir)
