"""The newest records of a run's `metrics.jsonl`, read as they are written.

Invariants:
- A line that is not a record is counted and skipped.
- Of the older files, only the newest is read at first: gauges need the newest records, and a run may keep a gigabyte.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from headrace.serve.tracing.retention import Tail


class NewestRecords:
    """Newest record of each of some kinds. `bad_lines` counts the lines that are not records."""

    def __init__(self, path: Path, kinds: Collection[str]) -> None:
        self._tail, self._kinds = Tail(path, newest=2), frozenset(kinds)
        self.newest: dict[str, dict[str, Any]] = {}
        self.bad_lines = 0

    def update(self) -> None:
        """Read what was written since the last call; at first, the newest two files. Raises OSError."""
        for line in self._tail.lines():
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                self.bad_lines += 1
            elif record["kind"] in self._kinds:
                self.newest[record["kind"]] = record
