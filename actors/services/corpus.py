"""A corpus of passages, and its index by BM25.

Invariants:
- A corpus is a JSONL file of objects with `id` and `contents`; the first line that is not one refuses the whole file.
- A search always returns as many passages as were asked for, or all of them: passages without a word of the query come
  last. Equal scores are ordered by position in the file, so that the same search always has the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.actors.services.service import Passage

WORD: Final = r"(?u)\b\w+\b"
MAX_LINE_BYTES: Final = 8 << 20
"""Maximum length of a line; a file without line breaks is no corpus."""


class CorpusRefused(Exception):
    """The file is not a corpus. The message names the file, the line and the reason."""


class Hashing(Protocol):
    """Hash that lines are added to."""

    def update(self, data: bytes, /) -> object: ...


def read_passages(path: Path, digest: Hashing | None = None) -> Iterator[str]:
    """Yield the contents of each passage, adding the file's bytes to `digest`. Raises CorpusRefused."""
    number = found = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if digest is not None:
                    digest.update(line)
                if len(line) > MAX_LINE_BYTES:
                    raise CorpusRefused(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; split it")
                if line.isspace():
                    continue
                yield _contents(path, number, line)
                found += 1
    except OSError as error:
        raise CorpusRefused(f"{path}: {error.strerror}; name a JSONL file of {{id, contents}}") from error
    if not found:
        raise CorpusRefused(f"{path} has no passage; name a JSONL file of {{id, contents}}")


def _contents(path: Path, number: int, line: bytes) -> str:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise CorpusRefused(f"{path}, line {number}: not valid JSON: {error}; correct or remove it") from error
    match row:
        case {"id": str() | int(), "contents": str() as contents} if contents.strip():
            return contents
    raise CorpusRefused(f"{path}, line {number}: not an object with id and contents; correct or remove it")


def digest_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PassageIndex:
    """BM25 index of a corpus, in memory. `search` may be called by several threads at once."""

    def __init__(self, path: Path) -> None:
        """Read and index a corpus, which takes about 0.1 ms for each passage. Raises CorpusRefused."""
        import bm25s

        digest = hashlib.sha256()
        self.passages = tuple(read_passages(path, digest))
        self.digest = digest.hexdigest()
        words = bm25s.tokenize(list(self.passages), token_pattern=WORD, stopwords="en", show_progress=False)
        # bm25s cannot index passages of nothing but common words; such a corpus has no scores.
        self._index = bm25s.BM25() if any(words.ids) else None
        if self._index is not None:
            self._index.index(words, show_progress=False)
        self._tokenize = bm25s.tokenize

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Return the best passages for each query, best first."""
        tokens = self._tokenize(
            list(queries), token_pattern=WORD, stopwords="en", return_ids=False, show_progress=False
        )
        return [self._best(words, top_k) for words in tokens]

    def _best(self, words: list[str], top_k: int) -> list[Passage]:
        count = len(self.passages)
        scores: NDArray[np.float32] = np.zeros(count, dtype=np.float32)
        if words and self._index is not None:
            scores = self._index.get_scores(words)
        best = np.arange(count)
        if top_k < count:
            # The k-th best score splits the passages in linear time; sorting all of a large corpus would take longer
            # than the search.
            bound = np.partition(scores, count - top_k)[count - top_k]
            above, equal = np.flatnonzero(scores > bound), np.flatnonzero(scores == bound)
            best = np.concatenate([above, equal[: top_k - len(above)]])
        ordered = best[np.lexsort((best, -scores[best]))]
        return [Passage(contents=self.passages[at], score=float(scores[at])) for at in ordered]
