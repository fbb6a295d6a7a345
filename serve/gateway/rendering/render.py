"""The renderer interface: the operations that a session needs from a tokenizer and its chat template.

Invariants:
- The output of `render` ends with the opening of the policy's turn, unless another ending is asked for.
- `bridge` closes the sampled turn if it did not close itself, renders only the new messages and opens the next turn:
  the session sends the history plus the bridge and never renders the history again.
- Contents are text: markup inside a message never becomes a control token.
- System messages after the first are always merged in the same manner, so that a growing conversation only appends
  tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from headrace.buffer.trajectories.token_kinds import KindRuns
from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.conversation import Message, ToolCall, ToolSpec

TokenIds: TypeAlias = "array[int]"
"""Array with type code `i` (int32)."""


class Renderer(Protocol):
    """Renderer of one model. Its methods are pure functions of their arguments (except caches). All ids, including
    those that the policy may sample, are in `[0, vocab_size)`; `stop_ids` end a turn of the policy."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def template(self) -> str:
        """The text of the chat template."""

    @property
    def bridges(self) -> bool:
        """True when the template's turns can be appended to a history without rendering it again (probed at
        startup)."""

    @property
    def opens_reasoning(self) -> bool:
        """True when the generation prompt opens the reasoning (`<think>`), so that an output begins inside the
        reasoning."""

    @property
    def continues(self) -> bool:
        """True when every text of the policy's can be rendered as an open message (probed at startup). If it is False,
        the policy can continue its recorded turns only, and `render` refuses the texts that the template rewrites."""

    @property
    def marks_bodies(self) -> bool:
        """True when the kinds of tokens are asked for, and the template shows where message bodies begin and end
        (probed at startup)."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ending: Ending = Ending.TURN) -> TokenIds:
        """Return all ids of the conversation up to the start of the policy's turn, or to another ending. Raises
        TemplateRefused."""

    def bridge(
        self,
        last_id: int,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        ending: Ending = Ending.TURN,
    ) -> TokenIds:
        """Return the ids between the last sampled id (`last_id`, which is a stop id unless the turn was cut off) and
        the next one. `calls` are the calls of the sampled turn, for templates that repeat them with their results.
        Requires `bridges`. Raises TemplateRefused."""

    def insert(self, text: str) -> TokenIds:
        """Return the ids of a text that is inserted after sampled ids, with which it shares no id. Raises
        TemplateRefused if the tokenizer cannot do this."""

    def insert_kinds(self, ids: TokenIds, message: Message) -> KindRuns | None:
        """Return the kinds of the `ids` that `insert` returned for the text of a message; None if the parts of the text
        cannot be told apart in them. Requires `marks_bodies`."""

    def render_kinds(
        self, ids: TokenIds, messages: Sequence[Message], tools: Sequence[ToolSpec], *, observed_from: int
    ) -> KindRuns | None:
        """Return the kinds of the `ids` that `render` returned. Messages from the index `observed_from` on came after a
        turn of the policy. None if the template hides these messages. Requires `marks_bodies`."""

    def bridge_kinds(self, ids: TokenIds, calls: Sequence[ToolCall], messages: Sequence[Message]) -> KindRuns | None:
        """Return the kinds of the `ids` that `bridge` returned; None if the template hides these messages. Requires
        `marks_bodies`."""

    def count_tokens(self, texts: Iterable[str], *, stop_at: int) -> int:
        """Return the number of tokens in the texts alone, without a template; counting stops at about `stop_at`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text with spelled-out special tokens; bytes that are not valid UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, which may be a part of a character; special tokens are spelled out."""

    def visible(self, text: str) -> str:
        """Return the text without spelled-out special tokens."""
