"""The bytes of single tokens, which may be parts of a character.

Invariant: for ids of whole characters, the bytes of the ids, joined, are the text that the tokenizer decodes them to
with special tokens spelled out (in a sentencepiece vocabulary, perhaps behind one blank).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\u2581"
"""Sentencepiece's character for a blank."""


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (openai/gpt-2, encoder.py,
    bytes_to_unicode), in order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return {chr(byte if byte in printable else next(moved)): byte for byte in range(256)}


class TokenBytes:
    """Bytes of a tokenizer's tokens: those of its added tokens, of byte-level pieces, and of sentencepiece's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            int(token_id): token.content.encode() for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._alphabet = byte_alphabet() if "ByteLevel" in _types(decoder) else {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that only pads the model's vocabulary."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        # Some vocabularies list the tokens of bytes as added ones too.
        if not self._alphabet and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        if (added := self._added.get(token_id)) is not None:
            return added
        if self._alphabet:
            return bytes(map(self._alphabet.__getitem__, piece))
        return str(piece).replace(_BLANK, " ").encode()


def _types(decoder: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a decoder and of its parts."""
    yield str(decoder.get("type", ""))
    for part in decoder.get("decoders", ()):
        yield from _types(part)
