"""Echoes: the messages in which an agent sends back what the policy said, and what agents change in them.

Invariants:
- The words of a request decide. A message that differs from the served turn by more than a known change is an edit,
  whatever ids it carries.
- A change is known only if it was recorded from an agent program (`KNOWN_CHANGES`). From any other program, an echo has
  the served texts, and arguments that are equal after JSON parsing.
- Reasoning is never compared: agents drop, shorten or summarise it, and the sampled reasoning remains in the tokens. It
  only chooses between turns with equal words.
- Digests are stable across processes, so that a session can still be matched after the gateway is restarted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Final

import orjson

from headrace.serve.gateway.conversation import Block, Reasoning, Text, ToolCall

MAX_LEVELS: Final = 64
"""Nesting limit for arguments, which an agent may nest arbitrarily deep."""

_CHANGE_OF_FOLDER: Final = re.compile(r"^\s*cd \S+ *&& *")
_BLANKS_AT_LINE_ENDS: Final = re.compile(r"[ \t]+$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChanges:
    """Changes that one agent program was recorded to make. `client` is how its User-Agent begins.

    - `moves_text`: text after a call comes before all calls.
    - `drops_blank_text`: texts of blanks only are left out.
    - `trims_lines`: blanks at the ends of the lines of string arguments are left out.
    - `adds_defaults`: arguments that are false are added.
    - `changes_types`: strings that are JSON numbers or booleans become those.
    - `drops_folder`: the argument `command` loses a leading `cd FOLDER && `.
    """

    client: str
    moves_text: bool = False
    drops_blank_text: bool = False
    trims_lines: bool = False
    adds_defaults: bool = False
    changes_types: bool = False
    drops_folder: bool = False


KNOWN_CHANGES: Final = (
    # Recorded with Claude Code 2.1: tests/integration/test_gateway_histories.py has each change, and
    # tests/contracts/test_agents.py runs the program.
    KnownChanges(
        client="claude-cli/",
        moves_text=True,
        drops_blank_text=True,
        trims_lines=True,
        adds_defaults=True,
        changes_types=True,
        drops_folder=True,
    ),
)
"""The other agents that were recorded need no entry: Codex and mini-swe-agent send back every byte of words and
arguments, and qwen-code and opencode change at most how arguments are spelled."""


def changes_of(client: str) -> KnownChanges | None:
    """Return the known changes of the program with this User-Agent; None if it has none."""
    return next((changes for changes in KNOWN_CHANGES if client.startswith(changes.client)), None)


class Drift(StrEnum):
    """Difference between a message and the served turn that it repeats or replaces."""

    NONE = ""
    """No difference."""
    SPELLING = "spelling"
    """The same values of arguments, spelled differently as JSON."""
    TEXT = "text"
    """A known change of the text."""
    ARGUMENTS = "arguments"
    """A known change of arguments."""
    CALLS = "calls"
    """Calls with other ids."""
    ORDER = "order"
    """Text and calls in a different order."""
    EDITED = "edited"
    """Other words: the message is an edit, and context in a row of its own."""


def digest(*parts: str | bytes) -> bytes:
    """Return a 16-byte digest; each part is delimited by its length."""
    pieces: list[bytes] = []
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        pieces += (len(data).to_bytes(8, "little"), data)
    return blake2b(b"".join(pieces), digest_size=16).digest()


class Words:
    """The words of a message, and their digests, computed when they are asked for."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = tuple(blocks)
        self._visible = [block for block in self._blocks if not isinstance(block, Reasoning)]
        self.calls = tuple(block for block in self._visible if isinstance(block, ToolCall))

    @cached_property
    def text(self) -> str:
        return "".join(block.text for block in self._visible if isinstance(block, Text))

    @cached_property
    def text_digest(self) -> bytes:
        return digest(self.text)

    @property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call.id for call in self.calls)

    @cached_property
    def order(self) -> str:
        """The order of texts (t) and calls (c). Agents that drop the reasoning between two texts join them."""
        order = ""
        for block in self._visible:
            if isinstance(block, ToolCall):
                order += "c"
            elif not order.endswith("t") and not (isinstance(block, Text) and not block.text.strip()):
                order += "t"
        return order

    @cached_property
    def exact(self) -> bytes:
        """Digest of all words and ids, in their order."""
        call_words = [word for call in self.calls for word in (call.id, call.name, call.arguments)]
        return digest("assistant", self.order, self.text, *call_words)

    @cached_property
    def values(self) -> bytes:
        """Digest of the names of calls and the values of their arguments."""
        return digest(*(word for call in self.calls for word in (call.name, _normal(call.arguments, _same_numbers))))

    @property
    def arguments(self) -> bytes:
        """Digest of the arguments as they are spelled."""
        return digest(*(call.arguments for call in self.calls))

    @property
    def reasoning(self) -> bytes:
        return digest("".join(block.text for block in self._blocks if isinstance(block, Reasoning)).strip())

    def changed(self, changes: KnownChanges) -> bytes:
        """Digest of the words in a form that the known changes of a program leave as it is."""
        texts = (block.text for block in self._visible if isinstance(block, Text))
        text = "".join(each for each in texts if each.strip() or not changes.drops_blank_text)
        order = "" if changes.moves_text else self.order
        plain = partial(_plain, changes=changes)
        call_words = (word for call in self.calls for word in (call.name, _normal(call.arguments, plain)))
        return digest(order, text, *call_words)


@dataclass(frozen=True, slots=True)
class TurnFingerprint:
    """Fingerprint of a served turn, by which its echoes are found. It contains digests and call ids, but no text.
    `changed` has a digest for each of `KNOWN_CHANGES`."""

    exact: bytes
    text: bytes
    order: str
    values: bytes
    arguments: bytes
    reasoning: bytes
    changed: tuple[bytes, ...]
    call_ids: frozenset[str]

    @classmethod
    def of(cls, blocks: Iterable[Block]) -> TurnFingerprint:
        words = Words(blocks)
        return cls(
            exact=words.exact,
            text=words.text_digest,
            order=words.order,
            values=words.values,
            arguments=words.arguments,
            reasoning=words.reasoning,
            changed=tuple(words.changed(changes) for changes in KNOWN_CHANGES),
            call_ids=words.call_ids,
        )

    def drift_of(self, words: Words, changes: KnownChanges | None, *, ordered: bool = True) -> Drift:
        """Return how a message differs from this turn; `EDITED` if it is no echo of it. `changes` are the known ones of
        the program that sent it; `ordered` says whether its API keeps the order of text and calls."""
        if words.exact == self.exact:
            return Drift.NONE
        has_text = words.text_digest == self.text
        is_in_order = not ordered or words.order == self.order
        is_equal = has_text and is_in_order and words.values == self.values
        if not is_equal and (changes is None or words.changed(changes) != self.changed[KNOWN_CHANGES.index(changes)]):
            return Drift.EDITED
        if words.call_ids != self.call_ids:
            return Drift.CALLS
        if words.values != self.values:
            return Drift.ARGUMENTS
        if not has_text:
            return Drift.TEXT
        return Drift.SPELLING if words.arguments != self.arguments else Drift.ORDER


def _normal(arguments: str, normal: Callable[[Any], Any]) -> bytes:
    """Return arguments as sorted JSON, with their value as `normal` makes it; their text if they are not valid JSON or
    are nested too deeply. No arguments are an empty object."""
    try:
        return orjson.dumps(normal(orjson.loads(arguments or "{}")), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, _TooDeep):
        return arguments.encode("utf-8", "surrogatepass")


class _TooDeep(ValueError):
    """The value has more than `MAX_LEVELS` levels of nesting."""


def _same_numbers(value: Any, levels: int = MAX_LEVELS) -> Any:
    """Return the value with whole numbers as integers: many languages write 1.0 as 1."""
    if not levels:
        raise _TooDeep
    if isinstance(value, dict):
        return {key: _same_numbers(entry, levels - 1) for key, entry in value.items()}
    if isinstance(value, list):
        return [_same_numbers(entry, levels - 1) for entry in value]
    # orjson writes integers of at most 64 bits.
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _plain(value: Any, changes: KnownChanges, levels: int = MAX_LEVELS) -> Any:
    if not levels:
        raise _TooDeep
    if isinstance(value, dict):
        plain = {key: _plain(entry, changes, levels - 1) for key, entry in value.items()}
        if changes.drops_folder and isinstance(command := plain.get("command"), str):
            plain["command"] = _CHANGE_OF_FOLDER.sub("", command)
        return {key: entry for key, entry in plain.items() if entry is not False or not changes.adds_defaults}
    if isinstance(value, list):
        return [_plain(entry, changes, levels - 1) for entry in value]
    if isinstance(value, str):
        if changes.changes_types:
            with suppress(orjson.JSONDecodeError):
                spelled = orjson.loads(value)
                value = spelled if isinstance(spelled, bool | int | float) else value
        if isinstance(value, str):
            return _BLANKS_AT_LINE_ENDS.sub("", value) if changes.trims_lines else value
    return _same_numbers(value, levels)
