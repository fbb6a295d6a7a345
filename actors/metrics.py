"""`metrics.jsonl` of a run: one JSON object a line, appended by the actor that knows, each line complete.

Kinds: `step` (learner), `push` (engines), `evaluation` (service), `rollout_phases` (worker). Every record has `kind`
and `time_s` (Unix time).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from pathlib import Path


class MetricsLog:
    """Appends records; several processes may append to one file, since each record is a single O_APPEND write. Without
    a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def append(self, kind: str, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        line = orjson.dumps({"kind": kind, "time_s": time.time(), **record}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records, oldest first; a line that a power cut tore is left out."""
    if not path.exists():
        return []
    records = (_record(line) for line in path.read_bytes().split(b"\n"))
    return [record for record in records if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
