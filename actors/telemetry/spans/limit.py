"""Keeps the span files of a run within `telemetry.keep_bytes`.

Invariants:
- The oldest ordinary spans are removed first, and those of slow and failed rollouts only when no others are left.
- The files that processes are writing are never touched.
- Every removed span is counted in `removed.json` before it is gone.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import orjson
import zstandard

from headrace.actors.telemetry.spans.attempts import slow_or_failed
from headrace.actors.telemetry.spans.store import FOLDER, KEPT, REMOVED_FILE, TORN, SpanFolder, changed_s, is_ended
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.serve.tracing.retention import RetentionConfig
from headrace.serve.tracing.span_files import SUFFIX, ZSTD, compress, end
from headrace.serve.tracing.telemetry import TelemetrySection

ORDINARY: Final = "removed_ordinary"
SLOW_OR_FAILED: Final = "removed_slow_or_failed"
LEFT_OVER_S: Final = 600.0
"""Age at which a file without a writer is compressed."""
_ROOM: Final = 0.9
"""Share of the limit down to which spans are removed, so that not every check removes some."""
_LEVEL: Final = 6

logger = logging.getLogger(__name__)


def keep_spans(run_dir: Path, telemetry: TelemetrySection, retention: RetentionConfig) -> None:
    """Keep the span files of a run within its limits; a file that cannot be changed is left, with a warning."""
    folder, keep_bytes, days = run_dir / FOLDER, telemetry.keep_bytes, retention.days
    try:
        try:
            keep_within(folder, keep_bytes, days, lambda: slow_or_failed(run_dir))
        except LedgerRefused as error:
            logger.warning("no spans are preferred, since the ledger cannot be read: %s", error)
            keep_within(folder, keep_bytes, days, frozenset)
    except OSError as error:
        logger.warning("cannot limit the size of %s (see telemetry.keep_bytes): %s", folder, error)


def keep_within(folder: Path, keep_bytes: int, days: float, kept: Callable[[], Collection[str]]) -> Counter[str]:
    """Compress what ended processes left, and remove spans beyond `keep_bytes` and `days`. `kept` returns the traces
    that are removed last; it is called only if something must go. Return the number of removed spans by kind. Raises
    OSError."""
    store = SpanFolder(folder)
    for path in store.files():
        # Copies from other nodes continue when their node writes again.
        if path.parent == folder and path.name.endswith(SUFFIX) and changed_s(path) < time.time() - LEFT_OVER_S:
            compress_left_over(path)
    removed: Counter[str] = Counter()
    for path in _ended(store):
        if changed_s(path) < time.time() - days * 86400.0:
            removed += _remove(store, path, frozenset())
    excess = sum(_size(path) for path in store.files()) - keep_bytes
    if excess > 0:
        excess += int((1 - _ROOM) * keep_bytes)
        traces = frozenset(kept())
        for path in (each for each in _ended(store) if KEPT not in each.name):
            if excess > 0:
                before = _size(path)
                removed += _remove(store, path, traces)
                excess -= before - _size(_kept_path(path))
        for path in (each for each in _ended(store) if KEPT in each.name):
            if excess > 0:
                excess -= _size(path)
                removed += _remove(store, path, frozenset())
    return removed


def make_room(folder: Path, needed_bytes: int) -> Counter[str]:
    """Remove the oldest files whole until `needed_bytes` are gone or no ended file is left: for a full disk, which has
    no space for a smaller copy. Return the number of removed spans by kind."""
    store = SpanFolder(folder)
    removed: Counter[str] = Counter()
    for path in sorted(_ended(store), key=lambda path: (KEPT in path.name, changed_s(path))):
        if needed_bytes > 0:
            needed_bytes -= _size(path)
            removed[SLOW_OR_FAILED if KEPT in path.name else ORDINARY] += sum(1 for _ in store.spans_of(path))
            path.unlink(missing_ok=True)
    # There is room for the counts now.
    _count(store, removed)
    return removed


def _remove(store: SpanFolder, path: Path, traces: frozenset[str]) -> Counter[str]:
    """Remove a file but for the spans of these traces; return the counts."""
    torn_before = store.torn
    spans = list(store.spans_of(path))
    stay = [span for span in spans if span["trace_id"] in traces]
    gone = Counter({SLOW_OR_FAILED if KEPT in path.name else ORDINARY: len(spans) - len(stay)})
    _count(store, gone + Counter({TORN: store.torn - torn_before}))
    if stay:
        lines = [orjson.dumps({"resourceSpans": [span["otlp"]]}) for span in stay]
        modified = path.stat()
        data = zstandard.ZstdCompressor(level=_LEVEL).compress(b"\n".join(lines) + b"\n")
        replace_file(_kept_path(path), data)
        os.utime(_kept_path(path), ns=(modified.st_atime_ns, modified.st_mtime_ns))
    path.unlink(missing_ok=True)
    return +gone


def _count(store: SpanFolder, gone: Counter[str]) -> None:
    """Add to the counts of removed spans. Raises OSError."""
    if +gone:
        path = store.path / REMOVED_FILE
        try:
            known = Counter(orjson.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            known = Counter()
        replace_file(path, orjson.dumps(dict(known + gone)))
        logger.warning("removed spans to keep the limit (telemetry.keep_bytes): %s", dict(+gone))


def _ended(store: SpanFolder) -> list[Path]:
    """Return the files that no process writes any more, the oldest first."""
    return [path for path in store.files() if not path.name.endswith(SUFFIX)]


def compress_left_over(path: Path) -> None:
    """Compress the file of a process that was killed, or of one whose disk was full; leave one that has a writer."""
    try:
        lock = FileLock(os.open(path, os.O_RDWR | os.O_CLOEXEC), blocking=False)
    except (BlockingIOError, FileNotFoundError):
        return
    with lock:
        compress(path if is_ended(path) else end(path))


def _kept_path(path: Path) -> Path:
    name = path.name.removesuffix(ZSTD).removesuffix(SUFFIX).removesuffix(KEPT)
    return path.with_name(f"{name}{KEPT}{SUFFIX}{ZSTD}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
