"""Text, messages and token ids: tokenizer and chat template of a Hugging Face directory, without transformers.

Invariants:
- A conversation is rendered once; later turns only append: history, sampled ids, `bridge`, sampled ids, and so on.
- Contents are data: text that spells a special token is broken up by a space before it is rendered, so it never
  becomes one.
- Ids equal those of transformers' AutoTokenizer on the same directory.
- A template that does not close what it opens, or whose beginning depends on what follows, is refused.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from headrace.policies.tokenizer_errors import TemplateRefused, TokenizerInvalid, TokenizerMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PROBE = "x"


class ChatMessage(Protocol):
    """What a message must have."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class _Said:
    """A message of our own, for probes of the template."""

    __slots__ = ("content", "role")

    def __init__(self, role: str, content: str) -> None:
        self.role = role
        self.content = content


class ChatTokenizer:
    """Loads `tokenizer.json`, `tokenizer_config.json`, the chat template and, where they exist, the model's configs.

    Raises:
        TokenizerInvalid: a file is missing or unreadable; the message names it.
        TokenizerMismatch: the ids do not fit the model in `config.json`.
        TemplateRefused: the chat template cannot be extended turn by turn.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        """Number of ids, added tokens included; ids are in `[0, vocab_size)`."""
        self.eos_token = _token_text(config.get("eos_token"), folder)
        self.eos_id = self._id_of(self.eos_token, folder)
        self.stop_ids: tuple[int, ...] = (self.eos_id,)
        """Ids that end a turn of the policy."""
        self._special = _special_pattern(self._tokenizer)
        self._template = _compile_template(folder, config)
        self._check_model(folder)
        self._opening, self._closing = self._probe_turn()

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text. Special tokens in it are recognised: for contents of strangers use `render` and `bridge`."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def text(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The conversation as the template writes it. Raises TemplateRefused."""
        shown = [{"role": str(message.role), "content": self._as_data(message.content)} for message in messages]
        try:
            return self._template.render(
                messages=shown, add_generation_prompt=add_generation_prompt, eos_token=self.eos_token
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template refuses the messages: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of the conversation up to where the policy begins to speak. Raises TemplateRefused."""
        return self.encode(self.text(messages, add_generation_prompt=True))

    def bridge(self, last_id: int, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids between the policy's last sampled id and its next turn: rest of the old turn, `messages`, new opening.

        `last_id` is a stop id when the policy closed its turn itself; otherwise the bridge closes it.
        Raises TemplateRefused.
        """
        asked = [_Said("user", _PROBE), _Said("assistant", _PROBE)]
        before = self.text(asked, add_generation_prompt=False)
        after = self.text([*asked, *messages], add_generation_prompt=True)
        if not after.startswith(before):
            raise TemplateRefused(
                "the chat template rewrites earlier turns when messages follow: history cannot be kept"
            )
        closing = self._closing
        if last_id in self.stop_ids:
            closing = closing[len(self.eos_token) :]
        return self.encode(closing + after[len(before) :])

    def _as_data(self, content: str) -> str:
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", content)

    def _probe_turn(self) -> tuple[str, str]:
        """What the template writes before and after the content of an assistant turn."""
        asked = [_Said("user", _PROBE)]
        prompt = self.text(asked, add_generation_prompt=True)
        turn = self.text([*asked, _Said("assistant", _PROBE)], add_generation_prompt=False)
        if not turn.startswith(prompt + _PROBE):
            raise TemplateRefused(
                "the chat template renders an assistant turn otherwise than its generation prompt begins it"
            )
        opening, closing = self.text(asked, add_generation_prompt=False), turn[len(prompt + _PROBE) :]
        if not closing.startswith(self.eos_token):
            raise TemplateRefused(f"the chat template must close an assistant turn with eos_token {self.eos_token!r}")
        return prompt[len(opening) :], closing

    def _id_of(self, token: str, folder: Path) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerInvalid(f"{folder / 'tokenizer_config.json'}: eos_token {token!r} is not in tokenizer.json")
        return int(found)

    def _check_model(self, folder: Path) -> None:
        """Compare with the model's own numbers and take further stop ids from generation_config.json."""
        if (folder / "config.json").exists():
            check_fits(self, _read_json(folder / "config.json"), source=str(folder / "config.json"))
        path = folder / "generation_config.json"
        if not path.exists():
            return
        further = _as_ids(_read_json(path).get("eos_token_id"))
        for token_id in further:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerMismatch(f"{path}: eos_token_id {token_id}, but the tokenizer has {self.vocab_size} ids")
        self.stop_ids = tuple(dict.fromkeys((self.eos_id, *further)))


def check_fits(tokenizer: ChatTokenizer, model_config: dict[str, Any], *, source: str) -> None:
    """Refuse a tokenizer with ids the model does not have, or with another end of turn.

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


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerInvalid(f"{path}: cannot be read ({error}): a model directory needs tokenizer.json") from error
    try:
        return Tokenizer.from_str(content)
    except Exception as error:
        raise TokenizerInvalid(f"{path}: is no tokenizer.json of the tokenizers library: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerInvalid(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerInvalid(f"{path}: must hold one JSON object")
    return document


def _token_text(value: object, folder: Path) -> str:
    """A token of tokenizer_config.json: a string, or the older object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise TokenizerInvalid(f"{folder / 'tokenizer_config.json'}: eos_token must be a string, found {value!r}")
    return text


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or r"(?!)")


def _compile_template(folder: Path, config: dict[str, Any]) -> jinja2.Template:
    """`chat_template.jinja`, else `chat_template` of tokenizer_config.json, in the environment transformers uses."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if not isinstance(source, str):
        raise TokenizerInvalid(f"{folder}: has no chat template: add chat_template.jinja")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_from_template
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerInvalid(f"{folder}: the chat template does not compile: {error}") from error


def _raise_from_template(message: str) -> None:
    raise jinja2.TemplateError(message)
