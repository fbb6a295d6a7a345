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
from headrace.serve.tracing.otlp_lines import STATUSES, values_of
from headrace.serve.tracing.span_files import LOST_SUFFIX, ZSTD

FOLDER: Final = "spans"
"""Name of the folder of span files in a run's state."""
REMOVED_FILE: Final = "removed.json"
"""Counts of the spans that were removed to keep the limit, in the folder."""
TORN: Final = "torn"
KEPT: Final = ".kept"
"""Mark in the name of a file from which ordinary spans were removed."""
MAX_RESOURCES: Final = 1024
"""Resources that are held: one for each process, and any number that agents send."""
BEING_WRITTEN_S: Final = 60.0
"""Age below which a line without an end is one that is being written."""
_NUMBERED: Final = re.compile(r"^(?P<process>.+)\.(?P<number>\d{6,})(?:\.kept)?\.jsonl(?:\.zst)?$")
_TRACE_ID: Final = re.compile(rb'"traceId":"([0-9a-f]{32})"')
_CHILD: Final = re.compile(rb'"parentSpanId":"[0-9a-f]')
_SCOPE: Final = b',"scopeSpans":'
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
        with `roots` only those without a parent. Each is as `span_of` returns it."""
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
        try:
            with path.open("rb") as file:
                reader = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
                for line in io.BufferedReader(reader) if path.name.endswith(ZSTD) else file:
                    # Most lines are not wanted; searching is cheaper than parsing.
                    if roots and _CHILD.search(line):
                        continue
                    if wanted is not None and (found := _TRACE_ID.search(line)) and found[1] not in wanted:
                        continue
                    try:
                        # One object for all files of a process, however many spans are held.
                        key = line.partition(_SCOPE)[0]
                        span = span_of(orjson.loads(line), self._resources.get(key))
                    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError):
                        self.torn += line.endswith(b"\n") or changed_s(path) < time.time() - BEING_WRITTEN_S
                        continue
                    if len(self._resources) >= MAX_RESOURCES:
                        self._resources.clear()
                    self._resources[key] = span["resource"]
                    yield span
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


def span_of(document: dict[str, Any], resource: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the span of a line: `name`, `trace_id`, `span_id`, `parent_id` ("" for a root), `start_ns`, `end_ns`
    (nanoseconds since 1970), `status`, `detail` (text of the status), `attributes`, `events`, `links`, and the
    attributes of its `resource`, which are those given if they are known. `otlp` is the document's element. Raises
    AttributeError, LookupError, TypeError, ValueError for anything else."""
    [group] = document["resourceSpans"]
    [[span]] = [scope["spans"] for scope in group["scopeSpans"]]
    status = span.get("status", {})
    return {
        # Protobuf leaves out what is empty.
        "name": span.get("name", ""),
        "trace_id": f"{int(span['traceId'], 16):032x}",
        "span_id": f"{int(span['spanId'], 16):016x}",
        "parent_id": span.get("parentSpanId", ""),
        "start_ns": int(span["startTimeUnixNano"]),
        "end_ns": int(span["endTimeUnixNano"]),
        "status": STATUSES[status.get("code", 0)],
        "detail": status.get("message", ""),
        "attributes": values_of(span.get("attributes", ())),
        "events": [
            {
                "name": each.get("name", ""),
                "time_ns": int(each.get("timeUnixNano", 0)),
                "attributes": values_of(each.get("attributes", ())),
            }
            for each in span.get("events", ())
        ],
        "links": [
            {
                "trace_id": each.get("traceId", ""),
                "span_id": each.get("spanId", ""),
                "attributes": values_of(each.get("attributes", ())),
            }
            for each in span.get("links", ())
        ],
        "resource": values_of(group["resource"]["attributes"]) if resource is None else resource,
        "otlp": group,
    }
