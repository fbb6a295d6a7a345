"""The file of a process's spans: bounded memory, bounded files, and an exact count of what is lost.

Invariants:
- Ending a span never blocks. A span that is not written is counted, in `PROCESS-PID.lost.json` beside the file, which
  is written when its counts change.
- A batch that cannot be written stays queued and is tried again, until the queue is full. No half of a batch remains.
- `PROCESS-PID.jsonl` is the file in use, and this process has its lock. At `max_file_bytes`, and at the end of the
  process, it becomes `PROCESS-PID.000001.jsonl`, and then the same with `.zst`. Of two files that differ in `.zst` only
  both are whole, and a reader takes one.
- The first line of each file is the resource of its spans; each other line is a span.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final

import orjson
import zstandard

from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.serve.tracing.recorder import RecordedSpan

logger = logging.getLogger(__name__)

SUFFIX: Final = ".jsonl"
ZSTD: Final = ".zst"
LOST_SUFFIX: Final = ".lost.json"
QUEUE_FULL: Final = "queue_full"
"""Lost since the queue was full: more spans than the disk took, or a disk that took none."""
NOT_WRITTEN: Final = "not_written"
"""Lost at the end of the process, since the disk did not take them."""
REMOVED: Final = "removed"
"""Lost since somebody removed the file in use."""
BATCH_SPANS: Final = 512
"""Number of queued spans that are written at once instead of after the interval."""
SHUTDOWN_S: Final = 5.0
"""Time that the end of a process waits for a disk that does not answer."""
_LEVEL: Final = 3


class SpanFile:
    """A file to which ended spans are appended, in a thread of its own."""

    def __init__(
        self,
        path: Path,
        resource: Mapping[str, object],
        *,
        max_file_bytes: int,
        max_queue_spans: int,
        interval_s: float,
    ) -> None:
        """Write to `path` (`.../PROCESS-PID.jsonl`) at least every `interval_s` seconds."""
        self._path, self._max_file_bytes = path, max_file_bytes
        self._max_queue_spans, self._interval_s = max_queue_spans, interval_s
        self._header = orjson.dumps({"resource": dict(resource)}, default=str) + b"\n"
        self._queue: deque[RecordedSpan] = deque()
        self._lost: Counter[str] = Counter()
        self._stored_lost = 0
        self._lock: FileLock | None = None
        self._descriptor, self._size, self._spans = -1, 0, 0
        self._ended = False
        self._counting, self._writing = Lock(), Lock()
        self._due = Event()
        self._failing = False
        self._thread = Thread(target=self._work, name="span-file", daemon=True)
        self._thread.start()

    def add(self, span: RecordedSpan) -> None:
        """Queue a span that has ended."""
        if self._ended or len(self._queue) >= self._max_queue_spans:
            with self._counting:
                self._lost[NOT_WRITTEN if self._ended else QUEUE_FULL] += 1
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH_SPANS:
            self._due.set()

    def flush(self, timeout_s: float) -> bool:
        """Write what is queued; return False if the disk does not take it, or does not answer in time."""
        if not self._writing.acquire(timeout=timeout_s):
            return False
        try:
            return self._write_all()
        finally:
            self._writing.release()

    def shutdown(self) -> None:
        """Write what is queued and compress the file, within `SHUTDOWN_S`. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._due.set()
        self._thread.join(SHUTDOWN_S)

    def _work(self) -> None:
        while not self._ended:
            self._due.wait(self._interval_s)
            self._due.clear()
            with self._writing:
                self._write_all()
        with self._writing:
            self._write_all()
            if self._queue:
                with self._counting:
                    self._lost[NOT_WRITTEN] += len(self._queue)
                self._queue.clear()
            self._close()
            self._store_lost()

    def _write_all(self) -> bool:
        """Write all queued spans, and the counts if they changed; return whether the disk took everything."""
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))]
            try:
                self._append(b"".join(map(line_of, batch)), len(batch))
            except OSError as error:
                self._queue.extendleft(reversed(batch))
                if not self._failing:
                    logger.warning("spans wait, since %s cannot be written: %s", self._path, error)
                self._failing = True
                return False
            self._failing = False
        return self._store_lost()

    def _append(self, data: bytes, spans: int = 0) -> None:
        """Append whole lines. Raises OSError; the file then is as it was."""
        if self._size + len(data) > self._max_file_bytes and self._size > len(self._header):
            self._close()
        if self._descriptor < 0:
            self._lock = FileLock(self._path)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._size, self._spans = os.fstat(self._descriptor).st_size, 0
        if self._size == 0:
            data = self._header + data
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self._spans += spans

    def _close(self) -> None:
        """End the file and compress it."""
        if self._lock is None:
            return
        try:
            compress(end(self._path))
        except FileNotFoundError:
            with self._counting:
                self._lost[REMOVED] += self._spans
        except OSError as error:
            logger.warning("a span file beside %s cannot be compressed: %s", self._path, error)
        self._lock.release()
        os.close(self._descriptor)
        self._lock, self._descriptor, self._size = None, -1, 0

    def _store_lost(self) -> bool:
        with self._counting:
            lost = dict(self._lost)
        total = sum(lost.values())
        if total == self._stored_lost:
            return True
        try:
            replace_file(lost_path(self._path), orjson.dumps(lost))
        except OSError:
            return False
        logger.warning("%d spans are lost so far (%s): see telemetry.max_queue_spans", total, self._path.name)
        self._stored_lost = total
        return True


def lost_path(path: Path) -> Path:
    """Return the path of the counts of a span file in use."""
    return path.with_name(path.name.removesuffix(SUFFIX) + LOST_SUFFIX)


def end(path: Path) -> Path:
    """Give a span file in use its final number; return its path. The caller has its lock. Raises OSError."""
    stem = path.name.removesuffix(SUFFIX)
    taken = [int(each.name.removeprefix(f"{stem}.")[:6]) for each in path.parent.glob(f"{stem}.[0-9]*{SUFFIX}*")]
    return path.rename(path.with_name(f"{stem}.{max(taken, default=0) + 1:06d}{SUFFIX}"))


def compress(path: Path) -> Path:
    """Compress a span file that has its final number; return its new path. Raises OSError."""
    target, found = path.with_name(f"{path.name}{ZSTD}"), path.stat()
    staged = path.with_name(f".{target.name}.staged")
    try:
        with path.open("rb") as source, staged.open("wb") as sink:
            zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).copy_stream(source, sink, size=found.st_size)
        os.utime(staged, ns=(found.st_atime_ns, found.st_mtime_ns))
        staged.rename(target)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    path.unlink()
    return target


def line_of(span: RecordedSpan) -> bytes:
    """Return one line of the span file. Ids are hexadecimal, times are in nanoseconds since 1970, and `parent_id` is ""
    for a root span."""
    record: dict[str, object] = {
        "name": span.name,
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name.lower(),
        "attributes": span.attributes,
    }
    if span.status.description:
        record["detail"] = span.status.description
    if span.events:
        record["events"] = [
            {"name": event.name, "time_ns": event.timestamp, "attributes": event.attributes} for event in span.events
        ]
    if span.links:
        record["links"] = [
            {
                "trace_id": f"{link.context.trace_id:032x}",
                "span_id": f"{link.context.span_id:016x}",
                "attributes": link.attributes,
            }
            for link in span.links
        ]
    try:
        return orjson.dumps(record, default=str) + b"\n"
    except TypeError:
        # Text of an agent with half of a surrogate pair, which is no UTF-8, or a number beyond 64 bits.
        return json.dumps(record, default=str, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
