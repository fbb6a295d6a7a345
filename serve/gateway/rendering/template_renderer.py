"""The renderer of a model directory: its tokenizer and its chat template.

Invariants: the invariants of render.Renderer hold; text in the tokenizer's cache is not tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrace.buffer.trajectories.token_kinds import KindRuns
from headrace.policies.errors import TemplateRefused, TokenizerInvalid
from headrace.policies.tokens.chat_template import Ending
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.conversation import Message, Role, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.gateway.rendering.body_marks import inserted, kinds_of, marked, without_marks
from headrace.serve.gateway.rendering.render import Renderer, TokenIds
from headrace.serve.gateway.rendering.template_messages import TemplateMessages

_TOO_DEEP = "arguments or tool descriptions are nested too deeply"
_PROBE_CALL = ToolCall("callprob1", "fern", '{"rush": "sedge"}')
_PROBES = (
    (say(Role.USER, "kelp"),),
    (
        say(Role.USER, "moss"),
        Message(Role.ASSISTANT, (_PROBE_CALL,)),
        Message(Role.TOOL, (ToolResult("callprob1", "bog"),)),
    ),
)
"""Conversations whose bodies a template must show, if the kinds of tokens are asked for."""


class TemplateRenderer:
    """Implements `render.Renderer`. Several threads may use one renderer. `token_kinds` asks for the kinds of
    tokens."""

    def __init__(self, tokenizer: ChatTokenizer, *, token_kinds: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shown = TemplateMessages(tokenizer.shape, tokenizer.control)
        self.vocab_size, self.stop_ids = tokenizer.model_vocab_size, tokenizer.stop_ids
        self.template, self.bridges = tokenizer.template.source, tokenizer.bridges
        self.opens_reasoning, self.continues = tokenizer.opens_reasoning, tokenizer.continues
        self.marks_bodies = token_kinds and all(map(self._shows_bodies, _PROBES))

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

    def insert_kinds(self, ids: TokenIds, message: Message) -> KindRuns | None:
        text, parts = inserted(message)
        plain = without_marks(self._tokenizer.control.as_data(text), parts)
        if plain is None:
            return None
        whole, offsets = self._tokenizer.inserted_ids_and_offsets(plain[0])
        return kinds_of(offsets, plain[1]) if whole == list(ids) else None

    def render_kinds(
        self, ids: TokenIds, messages: Sequence[Message], tools: Sequence[ToolSpec], *, observed_from: int
    ) -> KindRuns | None:
        def text(shown: Sequence[Message]) -> str:
            return self._tokenizer.template.text(*self._shown.whole(shown, tools), add_generation_prompt=True)

        return self._kinds(ids, messages, observed_from, text)

    def bridge_kinds(self, ids: TokenIds, calls: Sequence[ToolCall], messages: Sequence[Message]) -> KindRuns | None:
        def text(shown: Sequence[Message]) -> str:
            return self._tokenizer.continuation_text(*self._shown.after(calls, shown))

        return self._kinds(ids, messages, 0, text)

    def _kinds(
        self, ids: TokenIds, messages: Sequence[Message], observed_from: int, text: Callable[[Sequence[Message]], str]
    ) -> KindRuns | None:
        """Return the kinds of `ids`, which are those of `text(messages)`, perhaps without the first one."""
        for inside in (False, True):
            shown, bodies = marked(messages, observed_from=observed_from, inside=inside)
            try:
                plain = without_marks(text(shown), bodies)
            except TemplateRefused:
                continue
            if plain is None:
                continue
            whole, offsets = self._tokenizer.ids_and_offsets(plain[0])
            skipped = len(whole) - len(ids)
            if skipped in (0, 1) and whole[skipped:] == list(ids):
                return kinds_of(offsets[skipped:], plain[1])
        return None

    def _shows_bodies(self, messages: Sequence[Message]) -> bool:
        observed_from = min(2, len(messages))
        try:
            ids = self.render(messages, ())
        except TemplateRefused:
            return False
        return self.render_kinds(ids, messages, (), observed_from=observed_from) is not None

    def count_tokens(self, texts: Iterable[str], *, stop_at: int) -> int:
        return self._tokenizer.count(texts, stop_at=stop_at)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.spell(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def visible(self, text: str) -> str:
        return self._tokenizer.control.removed(text)


def load_renderer(tokenizer_dir: Path, *, token_kinds: bool = False) -> Renderer:
    """Return the renderer of a model directory; `token_kinds` asks for the kinds of tokens. Raises a TokenizerInvalid
    that names the file, also if its chat template hides the bodies of messages although kinds are asked for."""
    renderer = TemplateRenderer(ChatTokenizer(tokenizer_dir), token_kinds=token_kinds)
    if token_kinds and not renderer.marks_bodies:
        raise TokenizerInvalid(
            f"{tokenizer_dir}: the chat template rewrites the bodies of messages, so observations cannot be told from "
            "its own tokens: set learner.observation_coef to 0, or use a template that shows bodies as they are"
        )
    return renderer
