"""Lines of a run's logs in the order of their times: of all actors on this node, and in copies of other nodes' logs.

Invariants:
- A line is complete, and an event as docs/run_directory.md describes it. Torn lines, lines of others and lines longer
  than `LONGEST_BYTES` are left out.
- A position is one in a file, which is known by its first line: it stays valid when the file is rotated or the run
  directory is copied. If the file has been removed, what follows is the oldest line that is left.
- Rotation between two reads loses no line of a file that is left.
- At most `CHUNK_BYTES` and one line of each actor are in memory, whatever the files contain.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from headrace.actors.record.files.logs import MAX_LINE_BYTES, log_path
from headrace.actors.record.files.node_copies import folders_of_nodes
from headrace.serve.tracing.retention import OLDER, older_files

CHUNK_BYTES: Final = 1 << 20
LONGEST_BYTES: Final = MAX_LINE_BYTES
"""Longer lines are not ours."""
LAST_S: Final = 253_402_300_799
"""The end of the year 9999, the last time that can be printed."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position after a line: the mark of its file (see `mark_of`), and the offset in bytes."""

    mark: str
    offset: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log without its newline, and its content."""

    raw: bytes
    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which events are wanted: of one actor, of one rollout or attempt of it, from a `logging` level on."""

    actor: str | None = None
    rollout: str | None = None
    attempt: int | None = None
    level: int = logging.NOTSET

    @property
    def needle(self) -> bytes:
        """Bytes that each wanted line contains."""
        return b"" if self.rollout is None else b'"rollout":' + orjson.dumps(self.rollout)

    def has(self, event: Mapping[str, Any]) -> bool:
        """Return whether an event is wanted, whichever actor logged it."""
        if self.rollout is not None and event.get("rollout") != self.rollout:
            return False
        if self.attempt is not None and event.get("attempt") != self.attempt:
            return False
        return not self.level or logging.getLevelNamesMapping().get(event["level"], 0) >= self.level


ALL: Final = Wanted()


class LogReader:
    """Reader of one actor's log; `position` moves over what has been read."""

    def __init__(self, path: Path, position: Position | None = None) -> None:
        self._path = path
        self.position = self._given = position

    def lines(self, wanted: Wanted = ALL) -> Iterator[LogLine]:
        """Yield the wanted lines after the position. Raises ValueError if the position that was given is beyond the end
        of its file."""
        with _open_files(self._path) as files:
            marks = [mark_of(file) for file in files]
            at = self.position
            start = marks.index(at.mark) if at is not None and at.mark in marks else 0
            for file, mark in zip(files[start:], marks[start:], strict=True):
                if mark is not None:
                    offset = at.offset if at is not None and at.mark == mark else 0
                    size = file.seek(0, 2)
                    if offset > size and at is self._given:
                        raise ValueError(f"{self._path}: position {offset} is beyond the end of the file")
                    # A copy whose original lost its end in a crash was cut, too.
                    yield from self._lines_of(file, mark, min(offset, size), wanted)

    def skip(self) -> None:
        """Move the position to the end."""
        # No id has a line break, so no line is parsed.
        for _ in self.lines(Wanted(rollout="\n")):
            pass

    def _lines_of(self, file: BinaryIO, mark: str, offset: int, wanted: Wanted) -> Iterator[LogLine]:
        needle = wanted.needle
        self.position = Position(mark, offset)
        for block in _blocks(file, offset):
            if not needle or needle in block:
                at = offset
                for line in block.split(b"\n")[:-1]:
                    at += len(line) + 1
                    if (not needle or needle in line) and (event := event_of(line)) is not None and wanted.has(event):
                        self.position = Position(mark, at)
                        yield LogLine(line, event)
            offset += len(block)
            self.position = Position(mark, offset)


class RunLogs:
    """Reader of the logs in a folder of a run and of their copies from other nodes; each call continues where the last
    one ended. With `from_now`, what has been logged so far is left out."""

    def __init__(self, folder: Path, wanted: Wanted = ALL, *, from_now: bool = False) -> None:
        self._folder, self._wanted = folder, wanted
        self._readers: dict[str, LogReader] = {}
        if from_now:
            for reader in self._all_readers():
                reader.skip()

    def new_lines(self) -> Iterator[LogLine]:
        """Yield what was logged since the last call, in the order of time."""
        streams = [reader.lines(self._wanted) for reader in self._all_readers()]
        yield from heapq.merge(*streams, key=lambda line: line.event["time"])

    def _all_readers(self) -> Sequence[LogReader]:
        for name, path in logs_in(self._folder).items():
            if self._wanted.actor in (None, actor_of(name)) and name not in self._readers:
                self._readers[name] = LogReader(path)
        return list(self._readers.values())


def lines_of_rollout(folder: Path, rollout: str, attempt: int | None = None) -> Iterator[LogLine]:
    """Yield what all actors logged while they worked for a rollout, or for one attempt of it, in the order of time.
    `folder` is the folder `logs` of the run."""
    return RunLogs(folder, Wanted(rollout=rollout, attempt=attempt)).new_lines()


def logs_in(folder: Path) -> dict[str, Path]:
    """Return the newest file of each log in a folder of a run, by the name of its actor; of copies from another node by
    `NODE/ACTOR`."""
    found: dict[str, Path] = {}
    for node, each in folders_of_nodes(folder).items():
        names = {OLDER.sub("", path.stem) for path in each.glob("*.jsonl")}
        found |= {f"{node}/{name}" if node else name: log_path(each, name) for name in sorted(names)}
    return found


def actor_of(name: str) -> str:
    """Return the actor of a name in `logs_in`."""
    return name.rpartition("/")[2]


def mark_of(file: BinaryIO) -> str | None:
    """Return the mark of a log file: the digest of its first line, which has a time and a process id. None if it has no
    complete line yet."""
    file.seek(0)
    first = file.readline(CHUNK_BYTES)
    if first.endswith(b"\n") or len(first) == CHUNK_BYTES:
        return hashlib.sha256(first).hexdigest()[:16]
    return None


def event_of(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line, or None if it is not an event."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(event, dict) or not isinstance(time := event.get("time"), int | float) or not 0 <= time <= LAST_S:
        return None
    texts = (event.get(key) for key in ("level", "actor", "message"))
    return event if all(isinstance(text, str) for text in texts) else None


def _blocks(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield what is in the file from an offset on, in blocks of whole lines. The content of a longer line than
    `LONGEST_BYTES` is in blocks of its own, which are not events."""
    file.seek(offset)
    rest = b""
    while chunk := file.read(CHUNK_BYTES):
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if end:
            yield rest[:end]
            rest = rest[end:]
        elif len(rest) > LONGEST_BYTES:
            yield rest
            rest = b""


@contextmanager
def _open_files(path: Path) -> Iterator[Sequence[BinaryIO]]:
    """Open all files of a log, the oldest first."""
    while True:
        with ExitStack() as stack:
            older, files = older_files(path), []
            for each in (*older, path):
                with suppress(FileNotFoundError):
                    files.append(stack.enter_context(each.open("rb")))
            # A rotation in between would hide a whole file: the newest, under its new name.
            if older == older_files(path):
                yield files
                return
