"""Pages of the logs that a run's actors wrote on one node.

Invariants:
- A page has complete lines that are valid JSON objects; torn lines are left out.
- A cursor has, for each actor, a position in one of its files. The file is known by its first line, so that a position
  stays valid when the file is rotated or the run directory is copied. If the file has been removed, the next page
  begins with the oldest line that is left.
- Between two pages, rotation loses no line of a file that is left.
"""

from __future__ import annotations

import base64
import hashlib
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Final

import orjson

from headrace.actors.errors import RunRefused
from headrace.actors.record.logs import log_path
from headrace.actors.runs.contract import LogPage
from headrace.serve.observing.retention import OLDER, older_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MAX_CURSOR: Final = 256 << 10
"""Maximum number of characters of a cursor that is read."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position after a line: the mark of its file (see `mark_of`), and the offset in bytes."""

    mark: str
    offset: int


@dataclass(slots=True, kw_only=True)
class _Page:
    """Lines of a page in the making."""

    left_bytes: int
    lines: list[str] = field(default_factory=list)
    is_full: bool = False

    def add(self, line: bytes) -> None:
        """Add a line, unless it is longer than what is left. Then the page is full. Raises RunRefused if no page of
        this size can have the line."""
        if len(line) <= self.left_bytes:
            self.left_bytes -= len(line)
            self.lines.append(line[:-1].decode())
            return
        if not self.lines:
            raise RunRefused(
                f"limit_bytes ({self.left_bytes}) is below the size of the next line; set it to at least {len(line)}"
            )
        self.is_full = True


def read_logs(folder: Path, actor: str | None, *, after: str, limit_bytes: int) -> LogPage:
    """Return the next lines of an actor's log, or of all logs, one actor after another, from the cursor `after` (empty:
    from the beginning), of at most `limit_bytes` with their newlines. Raises RunRefused for an unknown actor, an
    invalid cursor, and a limit below the size of the next line."""
    actors = logged_actors(folder)
    if actor is not None and actor not in actors:
        known = ", ".join(actors) or "none"
        raise RunRefused(f"no log of an actor {actor[:100]!r}; actors with a log on this node: {known}")
    positions = {name: found for name, found in _decoded(after).items() if name in actors} if after else {}
    page = _Page(left_bytes=limit_bytes)
    for name in actors if actor is None else (actor,):
        position = _continued(log_path(folder, name), positions.get(name), page)
        if position is not None:
            positions[name] = position
        if page.is_full:
            break
    return LogPage(lines=tuple(page.lines), cursor=_encoded(positions))


def logged_actors(folder: Path) -> tuple[str, ...]:
    """Return the names of the actors that have a log in this folder."""
    return tuple(sorted({OLDER.sub("", path.stem) for path in folder.glob("*.jsonl")}))


def mark_of(file: BinaryIO) -> str | None:
    """Return the mark of a log file: the digest of its first line, which has a time and a process id. None if it has no
    complete line yet."""
    file.seek(0)
    first = file.readline()
    return hashlib.sha256(first).hexdigest()[:16] if first.endswith(b"\n") else None


def _continued(path: Path, position: Position | None, page: _Page) -> Position | None:
    """Add the lines after a position to a page, and return the position after the last one. Raises RunRefused."""
    with _open_files(path) as files:
        marks = [mark_of(file) for file in files]
        start = marks.index(position.mark) if position is not None and position.mark in marks else 0
        for file, mark in zip(files[start:], marks[start:], strict=True):
            if mark is None:
                continue
            offset = position.offset if position is not None and position.mark == mark else 0
            if offset > file.seek(0, 2):
                raise _invalid_cursor()
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if _is_event(line):
                    page.add(line)
                if page.is_full:
                    return position
                offset += len(line)
                position = Position(mark, offset)
    return position


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


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _encoded(positions: Mapping[str, Position]) -> str:
    document = {name: [position.mark, position.offset] for name, position in sorted(positions.items())}
    return base64.urlsafe_b64encode(orjson.dumps(document)).decode()


def _decoded(cursor: str) -> dict[str, Position]:
    """Return the positions in a cursor, which may come from anybody. Raises RunRefused."""
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError("too long")
        document = orjson.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        positions = {}
        for name, (mark, offset) in document.items():
            if not isinstance(mark, str) or type(offset) is not int or offset < 0:
                raise TypeError("no position")
            positions[name] = Position(mark, offset)
    except (AttributeError, TypeError, ValueError) as error:
        raise _invalid_cursor() from error
    return positions


def _invalid_cursor() -> RunRefused:
    return RunRefused("the cursor is not one of this run's logs; leave it out to begin with the oldest line")
