"""The tokens of a rollout as text: turns, with what was sampled, by which version, and what is trained.

Invariants:
- A stretch has tokens of one kind: sampled by one version and trained or not, or not sampled at all.
- At most `MAX_STRETCHES` stretches and `MAX_TOKENS` tokens of each are turned into text; the rest is counted.
- Without a tokenizer the numbers of the tokens are shown, and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from headrace.actors.record.files.run_directory import RunDirectory, read_configuration
from headrace.actors.telemetry.page.text import ShownText, shown
from headrace.buffer.audit.evidence import read_only, read_trajectory
from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.types import Row

MAX_STRETCHES: Final = 400
MAX_TOKENS: Final = 4_000
MAX_CHARACTERS: Final = 400_000
"""Characters of one rollout that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring tokens of a row. `turn` is the number of the turn, from 1, in its row; a turn is what came before
    it and what was sampled. `version` is empty unless they were sampled. `tokens_left_out` are not in `text`."""

    row: int
    turn: int
    start: int
    tokens: int
    sampled: bool
    trained: bool
    version: str
    stale_kv: bool
    kind: str
    mean_logprob: float | None
    text: ShownText
    tokens_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryText:
    """Text of a trajectory. `missing` says why there is none, or what is not shown."""

    stretches: tuple[Stretch, ...] = ()
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    temperature: float | None = None
    missing: tuple[str, ...] = ()


def read_text(directory: RunDirectory, rollout_id: str, attempt: int, file_number: int | None) -> TrajectoryText:
    """Read the trajectory of an attempt. Raises OSError."""
    if file_number is None:
        return TrajectoryText(missing=("This attempt left no trajectory.",))
    path = directory.path / "trajectories" / f"{file_number:06d}.db"
    if not path.is_file():
        return TrajectoryText(missing=("Its file of trajectories was removed by `buffer.keep_trajectories`.",))
    with closing(read_only(path)) as database:
        trajectory = read_trajectory(database, rollout_id, attempt)
    if trajectory is None:
        return TrajectoryText(missing=("The trajectory is missing or damaged: `headrace ledger verify` says more.",))
    tokenizer, reason = tokenizer_of(directory)
    missing = [reason] if reason else []
    found: list[Stretch] = []
    left_out, characters = 0, 0
    for number, row in enumerate(trajectory.rows):
        for start, end, turn in stretches_of(row):
            if len(found) >= MAX_STRETCHES or characters >= MAX_CHARACTERS:
                left_out += 1
                continue
            found.append(stretch_of(row, number, turn, start, end, tokenizer))
            characters += len(found[-1].text.text)
    if left_out:
        missing.append(f"{left_out} more stretches of tokens are not shown; `headrace ledger export` has all of them.")
    return TrajectoryText(
        stretches=tuple(found),
        rows=len(trajectory.rows),
        tokens=sum(len(row.tokens_T) for row in trajectory.rows),
        trained=sum(int(row.loss_mask_T.sum()) for row in trajectory.rows),
        temperature=trajectory.temperature,
        missing=tuple(missing),
    )


def stretches_of(row: Row) -> Iterator[tuple[int, int, int]]:
    """Yield the start, the end and the turn of each stretch of a row."""
    sampled_T = np.zeros(len(row.tokens_T), dtype=np.int64)
    for number, span in enumerate(row.versions, start=1):
        sampled_T[span.start : span.end] = number
    kinds_T = row.kinds_T if row.kinds_T is not None else np.zeros(len(row.tokens_T), dtype=np.uint8)
    key_T = sampled_T * 64 + kinds_T * 2 + row.loss_mask_T
    borders = [0, *(np.flatnonzero(np.diff(key_T)) + 1).tolist(), len(key_T)]
    turn, was_sampled = 1, False
    for start, end in pairwise(borders):
        if start == end:
            continue
        is_sampled = bool(sampled_T[start])
        turn += was_sampled and not is_sampled
        was_sampled = is_sampled
        yield start, end, turn


def stretch_of(row: Row, number: int, turn: int, start: int, end: int, tokenizer: Tokenizer | None) -> Stretch:
    span = next((span for span in row.versions if span.start <= start < span.end), None)
    ids = [int(token) for token in row.tokens_T[start : min(end, start + MAX_TOKENS)]]
    text = str(tokenizer.decode(ids, skip_special_tokens=False)) if tokenizer else " ".join(map(str, ids))
    return Stretch(
        row=number,
        turn=turn,
        start=start,
        tokens=end - start,
        sampled=span is not None,
        trained=bool(row.loss_mask_T[start]),
        version="" if span is None else str(span.version),
        stale_kv=span is not None and span.stale_kv,
        kind="" if row.kinds_T is None else TokenKind(int(row.kinds_T[start])).name.lower(),
        mean_logprob=None if span is None else float(row.logprobs_T[start:end].mean()),
        text=shown(text),
        tokens_left_out=max(0, end - start - MAX_TOKENS),
    )


def tokenizer_of(directory: RunDirectory) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of the run's model, from the model's directory or a checkpoint; None with the reason."""
    try:
        path = Path((read_configuration(directory) or {})["model"]["path"])
    except (OSError, KeyError, TypeError, ValueError):
        path = directory.path
    for folder in (path, *sorted(directory.checkpoints.glob("[0-9]*.[0-9]*"))):
        file = folder / "tokenizer.json"
        if file.is_file() and (tokenizer := load_tokenizer(str(file), file.stat().st_mtime_ns)) is not None:
            return tokenizer, ""
    return None, "The model's tokenizer is not here: numbers of tokens are shown instead of text."


@lru_cache(maxsize=1)
def load_tokenizer(path: str, _: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(path)
    except Exception:  # noqa: BLE001 - the library raises this class itself
        return None
