"""`metrics.jsonl` of a run: one JSON object a line, appended by the actor that knows, each line complete.

Kinds: `step` (learner), `push` (engines), `evaluation` (service), `rollout_phases` (worker), `stations` and `stall`
(service). Every record has `kind` and `time_s` (Unix time).

Invariants:
- Older lines lie in `metrics-000001.jsonl`, `metrics-000002.jsonl`, ..., oldest first: a file that reaches its size is
  renamed by whoever appends next. Files beyond the sizes and ages of `[retention]` are removed, the oldest first.
- Nothing is looked up here: what a resumed run must know stands in the ledger. Readers take what is left.
- A line that is no record (torn by a power cut, binary) is left out, and does not spoil its neighbours.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from headrace.serve.observing.retention import RotatingFile, kept_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from headrace.serve.observing.retention import RetentionConfig

TAIL_BYTES = 1 << 16
"""What is read of a file's end at first when only the last record is wanted."""


class MetricsLog:
    """Appends records; several processes may append to one file, since each record is a single O_APPEND write. Without
    a path nothing is kept."""

    def __init__(self, path: Path | None, retention: RetentionConfig | None = None) -> None:
        self._file = None if path is None else RotatingFile(path, retention)

    def append(self, kind: str, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = orjson.dumps({"kind": kind, "time_s": time.time(), **record}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        self._file.append(line)


def read_metrics(path: Path, kinds: Collection[str] = ()) -> list[dict[str, Any]]:
    """All complete records of these kinds (none given: of all), oldest first."""
    return list(each_metric(path, kinds))


def each_metric(path: Path, kinds: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """As `read_metrics`, one at a time: the files of a long run need not fit into memory."""
    # Most lines are of other kinds; to look for the name costs less than to parse them.
    names = [f'"{kind}"'.encode() for kind in kinds]
    for file_path in kept_files(path):
        with file_path.open("rb") as file:
            for line in file:
                if names and not any(name in line for name in names):
                    continue
                record = _record(line)
                if record is not None and (not kinds or record["kind"] in kinds):
                    yield record


def last_metric(path: Path, kind: str) -> dict[str, Any] | None:
    """The newest record of a kind, read from the end."""
    for file_path in reversed(kept_files(path)):
        size, length = file_path.stat().st_size, TAIL_BYTES
        while True:
            with file_path.open("rb") as file:
                file.seek(max(0, size - length))
                lines = file.read(length).splitlines()
            # The first line may be cut: with the whole file it is not.
            whole = lines if length >= size else lines[1:]
            found = (record for line in reversed(whole) if (record := _record(line)) and record["kind"] == kind)
            if (newest := next(found, None)) is not None:
                return newest
            if length >= size:
                break
            length *= 8
    return None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None
