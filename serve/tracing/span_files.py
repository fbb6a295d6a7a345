"""The file of a process's spans: bounded memory, bounded files, and an exact count of what is lost.

Invariants:
- Ending a span never blocks. A span that is not written is counted, in `PROCESS-PID.lost.json` beside the file, which
  is written when its counts change.
- Lines that cannot be written stay, and are tried again with the next batch, until the queue is full. No half of a
  batch remains in the file.
- `PROCESS-PID.jsonl` is the file in use, and this process has its lock. At `max_file_bytes`, and at the end of the
  process, it becomes `PROCESS-PID.000001.jsonl`, and then the same with `.zst`. Of two files that differ in `.zst` only
  both are whole, and a reader takes one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

import orjson
import zstandard
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.serve.tracing.otlp_lines import line_of, resource_of

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
_LEVEL: Final = 3


class SpanQueue(BatchSpanProcessor):
    """The SDK's queue, which counts what it cannot take. (By itself it drops its oldest span, and counts nothing.)"""

    def __init__(self, file: SpanFile, *, interval_s: float) -> None:
        """Hand spans to `file` at least every `interval_s` seconds."""
        super().__init__(
            file,
            max_queue_size=file.max_queue_spans,
            schedule_delay_millis=1000 * interval_s,
            max_export_batch_size=min(BATCH_SPANS, file.max_queue_spans),
        )
        self._file = file

    def on_end(self, span: ReadableSpan) -> None:
        if self._file.admit():
            super().on_end(span)


class SpanFile(SpanExporter):
    """A file to which spans are appended. Its exports and its shutdown block while the disk does."""

    def __init__(self, path: Path, resource: Mapping[str, Any], *, max_file_bytes: int, max_queue_spans: int) -> None:
        """Write to `path` (`.../PROCESS-PID.jsonl`) the spans of a process with this resource."""
        self.max_queue_spans = max_queue_spans
        self._path, self._max_file_bytes = path, max_file_bytes
        self._resource = orjson.dumps(resource_of(resource))
        self._lines: list[bytes] = []
        """Lines that the disk has not taken."""
        self._lost: Counter[str] = Counter()
        self._stored_lost = 0
        self._lock: FileLock | None = None
        self._descriptor, self._size, self._spans = -1, 0, 0
        self.admitted = self.done = 0
        """Spans that were admitted, and those of them that were written or lost."""
        self._ended = False
        self._counting, self._writing = Lock(), Lock()
        self._failing = False

    def admit(self) -> bool:
        """Return whether there is room for one more span; count it as lost if not."""
        with self._counting:
            if self._ended or self.admitted - self.done >= self.max_queue_spans:
                self._lost[NOT_WRITTEN if self._ended else QUEUE_FULL] += 1
                return False
            self.admitted += 1
            return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self.append([line_of(span, self._resource) for span in spans])

    def append(self, lines: list[bytes]) -> SpanExportResult:
        """Append the lines of admitted spans; a failure keeps them for the next call."""
        with self._writing:
            self._lines += lines
            return SpanExportResult.SUCCESS if self._write() else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self.append([]) is SpanExportResult.SUCCESS

    def end(self) -> None:
        """Take no more spans."""
        self._ended = True

    def shutdown(self) -> None:
        """Write what is left, count what the disk does not take, and compress the file."""
        self.end()
        with self._writing:
            self._write()
            with self._counting:
                if left := self.admitted - self.done:
                    self._lost[NOT_WRITTEN] += left
                self.done = self.admitted
            self._lines.clear()
            self._close()
            self._store_lost()

    def _write(self) -> bool:
        """Write all lines, and the counts if they changed; return whether the disk took everything."""
        if self._lines:
            try:
                self._append(b"".join(self._lines), len(self._lines))
            except OSError as error:
                if not self._failing:
                    logger.warning("spans wait, since %s cannot be written: %s", self._path, error)
                self._failing = True
                return False
            with self._counting:
                self.done += len(self._lines)
            self._lines.clear()
            self._failing = False
        return self._store_lost()

    def _append(self, data: bytes, spans: int) -> None:
        """Append whole lines. Raises OSError; the file then is as it was."""
        if self._size and self._size + len(data) > self._max_file_bytes:
            self._close()
        if self._descriptor < 0:
            self._lock = FileLock(self._path)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._size, self._spans = os.fstat(self._descriptor).st_size, 0
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
        logger.warning("%d spans are lost so far (%s): the disk is slower than the run's spans", total, self._path.name)
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
