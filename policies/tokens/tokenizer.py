"""Tokenizer and chat template of a Hugging Face directory, without transformers.

Invariants:
- A conversation is rendered once; later turns are only appended: history, sampled ids, `bridge`, sampled ids, and so
  on.
- Contents are data: a control token in a text is broken up by a space before rendering, so that it is treated as text.
- Ids equal those of transformers' AutoTokenizer for the same directory.
- The features that the template supports (`shape`, `bridges`) are determined once, when the tokenizer is loaded.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from headrace.policies.errors import TemplateRefused, TokenizerInvalid, TokenizerMismatch
from headrace.policies.tokens.added_tokens import ControlTokens
from headrace.policies.tokens.chat_template import ChatTemplate, Ending, SharedTool, TemplateMessage, token_text
from headrace.policies.tokens.continuation import Continuation
from headrace.policies.tokens.model_keys import language_keys
from headrace.policies.tokens.pieces import CACHE_BYTES, PieceEncoder
from headrace.policies.tokens.template_shape import USER, shape_of
from headrace.policies.tokens.token_bytes import TokenBytes

_INSERTIONS = ("bog", " bog", "\n\nbog", "</peat>", ".\n")


class TextMessage(Protocol):
    """Message with a role and a text."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class ChatTokenizer:
    """Tokenizer and chat template, loaded from `tokenizer.json`, `tokenizer_config.json`, the chat template and, if
    they exist, the model's configs. `cache_bytes` bounds the cache of tokenized texts.

    `vocab_size`: all ids, including added tokens, are in `[0, vocab_size)`. `model_vocab_size`: the model may sample
    ids below this, which is greater if its `config.json` has padding. `stop_ids` end the policy's turn. `bridges` is
    True if `bridge` may be used, `opens_reasoning` if a turn of the policy begins inside its reasoning, and `continues`
    if any text of the policy's can be left open for it to continue.

    Raises:
        TokenizerInvalid: a file is missing or unreadable; the message names it.
        TokenizerMismatch: the ids do not match the model in `config.json`.
        TemplateRefused: the chat template refuses a single user message.
    """

    def __init__(self, folder: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        path = folder / "tokenizer.json"
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerInvalid(
                f"{path}: cannot be read ({error}): a model directory needs tokenizer.json"
            ) from error
        try:
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:
            raise TokenizerInvalid(f"{path}: not a tokenizer.json of the tokenizers library: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocab_size: int = max(size, *(token_id + 1 for token_id in added), 0)
        self.model_vocab_size = self.vocab_size
        self.eos_token = token_text(config.get("eos_token"))
        if not self.eos_token:
            raise TokenizerInvalid(
                f"{folder / 'tokenizer_config.json'}: eos_token must be a string, found {config.get('eos_token')!r}"
            )
        self.eos_id = self._id_of(self.eos_token, folder)
        self.stop_ids: tuple[int, ...] = (self.eos_id,)
        self.control = ControlTokens(self._tokenizer)
        self.template = ChatTemplate(folder, config)
        self._check_model(folder)
        self.shape = shape_of(self.template)
        stops = [added[token_id].content for token_id in self.stop_ids if token_id in added]
        self._continuation = Continuation(self.template, self.shape, stops or [self.eos_token])
        self.bridges = self._continuation.history_free
        before = self.template.text([USER], add_generation_prompt=False)
        opening = self.template.text([USER], add_generation_prompt=True).removeprefix(before)
        self.opens_reasoning = opening.rstrip().endswith("<think>")
        self._pieces = PieceEncoder(self._tokenizer, cache_bytes=cache_bytes)
        self._bytes = TokenBytes(self._tokenizer)
        # Sentencepiece tokenizers begin a text with a blank. Behind a token, they do not.
        self._anchor = next((text for text in ("", self.eos_token) if self._inserts(text)), None)
        self.continues = self._continuation.leaves_open and self._anchor is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text. Control tokens are recognised: use `render` and `bridge` for untrusted text."""
        return tuple(self._pieces.ids(text))

    def count(self, texts: Iterable[str], *, stop_at: int) -> int:
        """Count the tokens of the texts, until `stop_at` is reached. The texts are tokenized separately and in slices,
        which gives slightly more tokens than tokenizing them as a whole."""
        return self._pieces.count(texts, stop_at=stop_at)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens; bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, which may be a part of a character."""
        return self._bytes.of(token_id)

    def text(self, messages: Sequence[TextMessage], *, add_generation_prompt: bool) -> str:
        """Render a conversation. Raises TemplateRefused."""
        return self.template.text(self._shown(messages), add_generation_prompt=add_generation_prompt)

    def render(self, messages: Sequence[TextMessage]) -> tuple[int, ...]:
        """Return the ids of a conversation up to the beginning of the policy's turn. Raises TemplateRefused."""
        return self.encode(self.text(messages, add_generation_prompt=True))

    def bridge(self, last_id: int, messages: Sequence[TextMessage]) -> tuple[int, ...]:
        """Return the ids between the policy's last sampled id and its next turn: the rest of the old turn, `messages`,
        and the opening of the new turn.

        If `last_id` is not a stop id, the bridge closes the old turn.
        Raises TemplateRefused.
        """
        return tuple(self.bridge_shown(last_id, [], self._shown(messages)))

    def insert(self, text: str) -> array[int]:
        """Return the ids of an escaped text that follows other text, from which it is tokenized separately. Raises
        TemplateRefused if the tokenizer changes such a text."""
        if self._anchor is None:
            raise TemplateRefused("the tokenizer adds characters to a text that is tokenized separately")
        ids = self._pieces.ids(self._anchor + text)
        return ids[1:] if self._anchor else ids

    def inserted_ids_and_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids that `insert` returns, and the characters `[start, end)` of each."""
        anchor = self._anchor or ""
        ids, offsets = self.ids_and_offsets(anchor + text)
        first = 1 if anchor else 0
        return ids[first:], [(start - len(anchor), end - len(anchor)) for start, end in offsets[first:]]

    def render_shown(
        self, messages: Sequence[TemplateMessage], tools: Sequence[SharedTool], ending: Ending = Ending.TURN
    ) -> array[int]:
        """Return the ids of a conversation of escaped messages and tools, in the template's format. Raises
        TemplateRefused."""
        return self._pieces.ids(self.template.ended(messages, tools, ending))

    def continuation_text(self, calls: Sequence[dict[str, Any]], messages: Sequence[TemplateMessage]) -> str:
        """Return the text whose ids `bridge_shown` returns, except that those may lack the first one. Raises
        TemplateRefused."""
        return self._continuation.after(calls, messages)[1]

    def ids_and_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, as `encode` does, and the characters `[start, end)` of each."""
        found = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return list(found.ids), list(found.offsets)

    def bridge_shown(
        self,
        last_id: int,
        calls: Sequence[dict[str, Any]],
        messages: Sequence[TemplateMessage],
        ending: Ending = Ending.TURN,
    ) -> array[int]:
        """Return the ids of `bridge` for escaped messages. `calls` are the tool calls of the sampled turn, for
        templates that repeat them with their results. Raises TemplateRefused."""
        closes, text = self._continuation.after(calls, messages, ending)
        ids = self._pieces.ids(text)
        # A stop token that the template also writes must not be repeated. GLM's turns end with the next role's token.
        if last_id in self.stop_ids and ids and (ids[0] in self.stop_ids if closes else ids[0] == last_id):
            del ids[0]
        return ids

    def _inserts(self, anchor: str) -> bool:
        """Return True if texts behind the anchor, without its id, are decoded unchanged when they follow other text."""
        before, skipped = self.encode("turf"), len(anchor and self.encode(anchor))
        whole = (self.spell([*before, *self.encode(anchor + text)[skipped:]]) for text in _INSERTIONS)
        return skipped < 2 and [*whole] == [f"turf{text}" for text in _INSERTIONS]

    def _shown(self, messages: Sequence[TextMessage]) -> list[TemplateMessage]:
        return [{"role": str(said.role), "content": self.control.as_data(said.content)} for said in messages]

    def _id_of(self, token: str, folder: Path) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerInvalid(f"{folder / 'tokenizer_config.json'}: eos_token {token!r} is not in tokenizer.json")
        return int(found)

    def _check_model(self, folder: Path) -> None:
        """Compare with the model's own values and take further stop ids from generation_config.json."""
        if (folder / "config.json").exists():
            model = language_keys(_read_json(folder / "config.json"))
            check_fits(self, model, source=str(folder / "config.json"))
            self.model_vocab_size = model["vocab_size"]
        path = folder / "generation_config.json"
        if not path.exists():
            return
        further = _as_ids(_read_json(path).get("eos_token_id"))
        for token_id in further:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerMismatch(f"{path}: eos_token_id {token_id}, but the tokenizer has {self.vocab_size} ids")
        self.stop_ids = tuple(dict.fromkeys((self.eos_id, *further)))


def check_fits(tokenizer: ChatTokenizer, model_config: dict[str, Any], *, source: str) -> None:
    """Check that the model has all ids of the tokenizer, and the same end of turn.

    Raises TokenizerMismatch, or TokenizerInvalid when the config is unusable.
    """
    rows = model_config.get("vocab_size")
    if not isinstance(rows, int):
        raise TokenizerInvalid(f"{source}: vocab_size must be a whole number, found {rows!r}")
    if tokenizer.vocab_size > rows:
        raise TokenizerMismatch(
            f"{source}: vocab_size {rows}, but the tokenizer has {tokenizer.vocab_size} ids: "
            "use the model's own tokenizer.json"
        )
    ends = _as_ids(model_config.get("eos_token_id"))
    if ends and tokenizer.eos_id not in ends:
        expected = ", ".join(map(str, ends))
        raise TokenizerMismatch(
            f"{source}: eos_token_id {expected}, but the tokenizer's {tokenizer.eos_token!r} is {tokenizer.eos_id}: "
            "use the model's own tokenizer.json"
        )


def _as_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerInvalid(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerInvalid(f"{path}: must contain one JSON object")
    return document
