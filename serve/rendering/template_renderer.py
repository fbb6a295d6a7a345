"""The renderer of a model directory: its tokenizer and its chat template.

Invariants: the invariants of render.Renderer hold; text in the tokenizer's cache is not tokenized again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.policies.errors import TemplateRefused
from headrace.policies.tokens.chat_template import Ending
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.rendering.template_messages import TemplateMessages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from headrace.serve.conversation import Message, ToolCall, ToolSpec
    from headrace.serve.rendering.render import Renderer, TokenIds

_TOO_DEEP = "arguments or tool descriptions are nested too deeply"


class TemplateRenderer:
    """Implements `render.Renderer`. Several threads may use one renderer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown = TemplateMessages(tokenizer.shape, tokenizer.control)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.model_vocab_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._tokenizer.stop_ids

    @property
    def template(self) -> str:
        return self._tokenizer.template.source

    @property
    def bridges(self) -> bool:
        return self._tokenizer.bridges

    @property
    def opens_reasoning(self) -> bool:
        return self._tokenizer.opens_reasoning

    @property
    def continues(self) -> bool:
        return self._tokenizer.continues

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ending: Ending = Ending.TURN) -> TokenIds:
        try:
            return self._tokenizer.render_shown(*self._shown.whole(messages, tools), ending)
        except RecursionError as error:
            raise TemplateRefused(_TOO_DEEP) from error

    def bridge(
        self,
        last_id: int,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        ending: Ending = Ending.TURN,
    ) -> TokenIds:
        try:
            return self._tokenizer.bridge_shown(last_id, *self._shown.after(calls, messages), ending)
        except RecursionError as error:
            raise TemplateRefused(_TOO_DEEP) from error

    def insert(self, text: str) -> TokenIds:
        return self._tokenizer.insert(self._tokenizer.control.as_data(text))

    def count_tokens(self, texts: Iterable[str], *, stop_at: int) -> int:
        return self._tokenizer.count(texts, stop_at=stop_at)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.spell(ids)

    def visible(self, text: str) -> str:
        return self._tokenizer.control.removed(text)


def load_renderer(tokenizer_dir: Path) -> Renderer:
    """Return the renderer of a model directory. Raises a TokenizerInvalid that names the file."""
    return TemplateRenderer(ChatTokenizer(tokenizer_dir))
