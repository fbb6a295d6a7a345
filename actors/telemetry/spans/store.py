"""Reads the span files of a run.

Invariants:
- Files are only read. Of two whole files of one number (a crash between two steps of their writer), one is read.
- A torn line is a lost span: it is counted, and its neighbours are read. So is a file that is no span file.
- Memory is bounded by one line, not by a file.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import orjson
import zstandard

from headrace.actors.record.files.node_copies import folders_of_nodes
from headrace.serve.tracing.span_files import LOST_SUFFIX, ZSTD

FOLDER: Final = "spans"
"""Name of the folder of span files in a run's state."""
REMOVED_FILE: Final = "removed.json"
"""Counts of the spans that were removed to keep the limit, in the folder."""
TORN: Final = "torn"
KEPT: Final = ".kept"
"""Mark in the name of a file from which ordinary spans were removed."""
BEING_WRITTEN_S: Final = 60.0
"""Age below which a line without an end is one that is being written."""
_NUMBERED: Final = re.compile(r"^(?P<process>.+)\.(?P<number>\d{6,})(?:\.kept)?\.jsonl(?:\.zst)?$")
_TRACE_ID: Final = re.compile(rb'"trace_id":"([0-9a-f]{32})"')
_CHILD: Final = re.compile(rb'"parent_id":"[0-9a-f]')
_WITHIN: Final = 512
_MARGIN_S: Final = 60.0
"""Clocks of two hosts and the times of files may differ by this much."""


@dataclass(slots=True)
class SpanFolder:
    """The span files in the folder of a run, and in its copies from other nodes. `torn` counts the torn lines that were
    met."""

    path: Path
    torn: int = 0
    _resources: dict[bytes, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_run(cls, run_dir: Path) -> Self:
        """Return the span files of the run with this state folder."""
        return cls(run_dir / FOLDER)

    def files(self) -> list[Path]:
        """Return all files that have spans, those that were changed last at the end."""
        found: dict[tuple[Path, str], Path] = {}
        for path in self._sorted("*.jsonl*"):
            if path.name.startswith(".") or path.name.endswith(LOST_SUFFIX):
                continue
            match = _NUMBERED.match(path.name)
            key = f"{match['process']}.{match['number']}" if match else path.name
            # A file from which nothing was removed comes before what was kept of it.
            known = found.get((path.parent, key))
            if known is None or (KEPT in known.name and KEPT not in path.name):
                found[path.parent, key] = path
        return [path for _, path in sorted((changed_s(path), path) for path in found.values())]

    def _sorted(self, pattern: str) -> list[Path]:
        folders = folders_of_nodes(self.path).values()
        return sorted(path for folder in folders if folder.is_dir() for path in folder.rglob(pattern))

    def spans(
        self,
        *,
        since_s: float = 0.0,
        until_s: float = float("inf"),
        traces: Collection[str] | None = None,
        roots: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Yield the spans that ended in [since_s, until_s) (Unix time), file by file: of these traces if given, and
        with `roots` only those without a parent. Each has `resource` beside what its writer recorded
        (docs/run_directory.md)."""
        wanted = None if traces is None else frozenset(each.encode() for each in traces)
        since_ns = int(since_s * 1e9)
        until_ns = None if until_s == float("inf") else int(until_s * 1e9)
        for path in self.files():
            if changed_s(path) < since_s - _MARGIN_S:
                continue
            for span in self.spans_of(path, wanted, roots=roots):
                end_ns = span["end_ns"]
                if end_ns >= since_ns and (until_ns is None or end_ns < until_ns):
                    yield span

    def spans_of(
        self, path: Path, wanted: frozenset[bytes] | None = None, *, roots: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the spans of one file, which may vanish at any time; with `wanted`, only those of these traces, and
        with `roots` only those without a parent."""
        resource: dict[str, Any] | None = None
        try:
            with path.open("rb") as file:
                reader = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
                for line in io.BufferedReader(reader) if path.name.endswith(ZSTD) else file:
                    # Most lines are not wanted; searching is cheaper than parsing.
                    if roots and _CHILD.search(line, 0, _WITHIN):
                        continue
                    found = None if wanted is None else _TRACE_ID.search(line, 0, _WITHIN)
                    if found is not None and wanted is not None and found[1] not in wanted:
                        continue
                    document = parsed(line)
                    if document is None:
                        self.torn += line.endswith(b"\n") or changed_s(path) < time.time() - BEING_WRITTEN_S
                    elif "resource" in document and "trace_id" not in document:
                        # One object for all files of a process, however many spans are held.
                        resource = self._resources.setdefault(line, document["resource"])
                    elif wanted is None or document["trace_id"].encode() in wanted:
                        yield document | {"resource": resource or {}}
        except FileNotFoundError:
            return
        except zstandard.ZstdError:
            self.torn += 1

    def lost(self) -> Counter[str]:
        """Return the number of lost spans by reason: what their processes counted, what was removed to keep the limit,
        and the torn lines that this object has met."""
        counts: Counter[str] = Counter()
        for path in [*self._sorted(f"*{LOST_SUFFIX}"), *self._sorted(REMOVED_FILE)]:
            try:
                counts.update({str(reason): int(n) for reason, n in orjson.loads(path.read_bytes()).items()})
            except (OSError, ValueError, AttributeError, TypeError):
                continue
        if self.torn:
            counts[TORN] += self.torn
        return counts


def is_ended(path: Path) -> bool:
    """Return whether the file has its final number."""
    return _NUMBERED.match(path.name) is not None


def changed_s(path: Path) -> float:
    """Return the time of the last change (Unix time); 0 if the file has vanished."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return a span or a resource; None if the line is neither."""
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("resource"), dict):
        return document
    if isinstance(document.get("trace_id"), str) and isinstance(document.get("end_ns"), int):
        return document
    return None
