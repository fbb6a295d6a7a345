"""The metrics of a run, read incrementally.

Invariants:
- A line is read once, however often the page is loaded.
- At most as many records of a kind are kept as `KEPT` says, the newest; `left_out` counts the others.
- A line that is not a record is skipped.
- Only the keys in `KINDS` are kept of a record; one that it lacks is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.serve.tracing.retention import Tail, kept_files

KEPT: Final = {"step": 20_000}
"""Number of records that are kept of a kind."""
KEPT_OF_OTHERS: Final = 2_000
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "step": (
        "step",
        "version",
        "skipped",
        "reward",
        "staleness",
        "mean_staleness",
        "max_staleness",
        "tokens",
        "loss",
        "grad_norm",
        "entropy",
        "step_s",
        "idle_s",
        "push_s",
        "collapsed",
    ),
    "push": (
        "version",
        "total_s",
        "seconds",
        "sent_bytes",
        "rollouts_in_flight",
        "requests_in_flight",
        "requests_retracted",
        "tokens_recomputed",
        "stall_share",
        "updated",
        "quarantined",
    ),
    "evaluation": ("step", "tag", "answers", "infra", "success", "mean_reward"),
    "stations": ("seconds", "in_flight", "held_up_by", "stations", "rollout_limit", "slowed_by"),
    "stall": ("ended", "reason"),
    "mismatch_alarm": ("step", "version", "mean", "alarm"),
}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Records:
    """The kept records of each kind, oldest first, and the number of older ones of each kind."""

    by_kind: Mapping[str, tuple[Record, ...]]
    left_out: Mapping[str, int]

    def of(self, kind: str) -> tuple[Record, ...]:
        return self.by_kind.get(kind, ())

    def last(self, kind: str) -> Record | None:
        records = self.of(kind)
        return records[-1] if records else None


class MetricsTail:
    """Reader of a run's `metrics.jsonl` and its older files. One thread at a time may call `read`."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path)
        self._kept: dict[str, deque[Record]] = {}
        self._counts: dict[str, int] = {}

    def mark(self) -> tuple[tuple[int, int], ...]:
        """Return what changes when there are new lines. Raises OSError."""
        return tuple((found.st_ino, found.st_size) for found in (path.stat() for path in kept_files(self._path)))

    def read(self) -> Records:
        """Read the new lines of all files, and return all kept records. Raises OSError."""
        for line in self._tail.lines():
            self._add(line)
        by_kind = {kind: tuple(records) for kind, records in self._kept.items()}
        return Records(by_kind, {kind: self._counts[kind] - len(records) for kind, records in by_kind.items()})

    def _add(self, line: bytes) -> None:
        try:
            document = orjson.loads(line)
            kind, at_s = document["kind"], float(document["time_s"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return
        if (keys := KINDS.get(kind)) is None:
            return
        record = {key: document.get(key) for key in keys} | {"time_s": at_s}
        self._kept.setdefault(kind, deque(maxlen=KEPT.get(kind, KEPT_OF_OTHERS))).append(record)
        self._counts[kind] = self._counts.get(kind, 0) + 1
