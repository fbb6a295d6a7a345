"""Tokenizes long texts piece by piece, with a cache of pieces.

Invariants:
- The ids equal those of the whole text. Text is split only where the tokenizer never looks across: at added tokens,
  and, if its pre-tokenizer always ends a word there, at ends of lines and before words. Both are checked with the
  tokenizer when the encoder is created; for a tokenizer that fails the check, texts are not split.
- Where a text is split depends on the text near the split, so prompts that differ in one line share all other
  pieces.
- The cache has at most `cache_bytes`. Several threads may use one encoder.
- The interpreter lock is released while a piece is tokenized.
- The values of a `BoundedCache` have at most `max_bytes`, by the sizes that callers pass; the least recently used are
  evicted first.
- Several threads may use a `BoundedCache`.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import product
from string import punctuation
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.policies.tokens.added_tokens import pattern_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_BYTES = 64 * 2**20
PIECE_MIN_CHARACTERS = 1024
SHORT_CHARACTERS = 64
"""Pieces of up to this length (texts between a template's tokens) and long pieces are cached. Pieces of intermediate
length can be tokenized about as fast as they can be found in the cache."""
PIECE_MAX_CHARACTERS = 8192
"""Length at which a piece is split at the next possible position, whatever text follows."""

_TAKEN = "/"
"""A line that begins with this is not split off, because words in o200k include a slash from the next line."""
_KINDS = "aZ\u00e9\u6f227\u0663.'_\u2014\u0301\U0001f600"
"""One character of each kind that word patterns distinguish."""
_LEFTS = [first + last for first, last in (*product(("a", " ", "\n"), _KINDS), *product("a", punctuation))]
_RIGHTS = [first + last for first, last in (*product(_KINDS, ("a", " ")), *product(punctuation, "a"))]
_GAP_LEFTS = ("a", "1a", ".\u00e9", "\u6f22", "\u0663")
_GAP_RIGHTS = (" a", " Z.", " s'")
_PROBES = (" a\nb ", "\n", " ", "a", "1", "'s", "\u00e9\u6f22", "\t\n  ", "A", ".")


Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Least-recently-used cache. Values are shared and must not be changed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Store a value; `size` is in bytes and includes the key."""
        with self._lock:
            if key in self._kept or size > self._max_bytes:
                return
            self._kept[key] = value, size
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]

    @property
    def bytes_kept(self) -> int:
        return self._bytes


class PieceEncoder:
    """Encoder of texts. `cuts_tokens` and `cuts_lines` are True if texts may be split at added tokens and at lines."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._cache: BoundedCache[str, array[int]] = BoundedCache(cache_bytes)
        added = tokenizer.get_added_tokens_decoder()
        # Added tokens that are found in the unchanged text; none if one of them includes neighbouring text.
        takes_more = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        self._ids_of_tokens = {
            token.content: int(token_id) for token_id, token in added.items() if not token.normalized and not takes_more
        }
        self._tokens = pattern_of(self._ids_of_tokens)
        self.cuts_tokens = self._ids_of_tokens != {} and self._same_in_pieces()
        self.cuts_lines = _ends_words_at_lines(tokenizer)

    def ids(self, text: str) -> array[int]:
        """Return the ids of a text; added tokens in it are recognised."""
        ids = array("i")
        start = 0
        for found in self._tokens.finditer(text) if self.cuts_tokens else ():
            for part in self._between(text[start : found.start()]):
                ids.extend(part)
            ids.append(self._ids_of_tokens[found[0]])
            start = found.end()
        for part in self._between(text[start:]):
            ids.extend(part)
        return ids

    def count(self, texts: Iterable[str], *, stop_at: int) -> int:
        """Count the tokens of the texts, in slices with arbitrary boundaries, up to the slice that reaches `stop_at`.
        Does not use the cache."""
        number = 0
        for text in texts:
            for start in range(0, len(text), PIECE_MAX_CHARACTERS):
                number += len(self._encode(text[start : start + PIECE_MAX_CHARACTERS]))
                if number >= stop_at:
                    return number
        return number

    def _between(self, text: str) -> Iterator[array[int]]:
        if len(text) < PIECE_MIN_CHARACTERS:
            if text:
                yield self._cached(text) if len(text) <= SHORT_CHARACTERS else self._encode(text)
            return
        start = 0
        while start < len(text):
            end = _cut(text, start) if self.cuts_lines else len(text)
            yield self._cached(text[start:end])
            start = end

    def _cached(self, piece: str) -> array[int]:
        if (known := self._cache.get(piece)) is None:
            known = self._encode(piece)
            self._cache.put(piece, known, sys.getsizeof(piece) + sys.getsizeof(known))
        return known

    def _encode(self, text: str) -> array[int]:
        # The method for lists computes no offsets, and releases the interpreter lock.
        return array("i", self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _same_in_pieces(self) -> bool:
        """Return True if added tokens isolate their neighbours, as probed between all kinds of text."""
        token = next(iter(self._ids_of_tokens))
        texts = [left + token + right + token for left, right in product(_PROBES, _PROBES)]
        self.cuts_tokens, self.cuts_lines = True, False
        return all(self.ids(text) == self._encode(text) for text in texts)


def _cut(text: str, start: int) -> int:
    """Return the end of the piece that begins at `start`, which is an end of a line that the following text selects."""
    forced = start + PIECE_MAX_CHARACTERS
    for end in _line_ends(text, start + PIECE_MIN_CHARACTERS, forced):
        if zlib.crc32(text[end : end + 16].encode(errors="replace")) % 16 == 0:
            return end
    # Window by window, since the text may have thousands of the one and none of the other.
    for begin in range(forced, len(text), PIECE_MAX_CHARACTERS):
        stop = begin + PIECE_MAX_CHARACTERS
        ends = (next(_line_ends(text, begin, stop), None), next(_gaps(text, begin, stop), None))
        if found := [end for end in ends if end is not None]:
            return min(found)
    return len(text)


def _line_ends(text: str, start: int, stop: int) -> Iterator[int]:
    """Yield the beginnings of lines between two characters that are not white space."""
    end = text.find("\n", start, stop) + 1
    while end:
        if end < len(text) and not text[end - 2].isspace() and not text[end].isspace() and text[end] not in _TAKEN:
            yield end
        end = text.find("\n", end, stop) + 1


def _gaps(text: str, start: int, stop: int) -> Iterator[int]:
    """Yield the ends of words before a single space and an ASCII letter."""
    end = text.find(" ", start, stop)
    while end >= 0:
        if text[end - 1].isalnum() and text[end + 1 : end + 2].isalpha() and text[end + 1].isascii():
            yield end
        end = text.find(" ", end + 1, stop)


def _ends_words_at_lines(tokenizer: Tokenizer) -> bool:
    """Return True if a word always ends where texts are split at lines: words are found by patterns, no probe has a
    word across the split, and no added token can be there."""
    if any(token.normalized for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    if tokenizer.normalizer is not None and _state(tokenizer.normalizer).get("type") != "NFC":
        return False
    if tokenizer.pre_tokenizer is None or type(tokenizer.model).__name__ != "BPE":
        return False
    state = _state(tokenizer.pre_tokenizer)
    steps = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    splits = any(step["type"] == "Split" or step.get("use_regex") for step in steps)
    known = all(step["type"] in {"Split", "Digits", "ByteLevel"} and not step.get("add_prefix_space") for step in steps)
    if not (splits and known):
        return False
    words = tokenizer.pre_tokenizer.pre_tokenize_str
    lines = ((left + "\n", right) for left, right in product(_LEFTS, _RIGHTS) if right[0] not in _TAKEN)
    gaps = product(_GAP_LEFTS, _GAP_RIGHTS)
    return all(
        [word for word, _ in words(left + right)] == [word for text in (left, right) for word, _ in words(text)]
        for left, right in (*lines, *gaps)
    )


def _state(part: Any) -> dict[str, Any]:
    return dict(json.loads(part.__getstate__()))
