"""Pages of the logs that a run's actors wrote on this node, and of the copies of other nodes' logs.

Invariants:
- A page has complete lines that are events; torn lines are left out.
- A cursor has, for each actor, a position in one of its files; see `log_lines`.
- Between two pages, rotation loses no line of a file that is left.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import orjson
from pydantic import Field, TypeAdapter

from headrace.actors.cluster.runs.contract import LogPage
from headrace.actors.errors import RunRefused
from headrace.actors.record.files.log_lines import LogReader, Position, actor_of, logs_in

MAX_CURSOR: Final = 256 << 10
"""Maximum number of characters of a cursor that is read."""
_CURSOR: Final = TypeAdapter(dict[str, tuple[str, Annotated[int, Field(ge=0)]]])
"""Mark and offset of a position in each log."""


@dataclass(slots=True, kw_only=True)
class _Page:
    """Lines of a page in the making."""

    left_bytes: int
    lines: list[str] = field(default_factory=list)
    is_full: bool = False

    def add(self, line: bytes) -> None:
        """Add a line, unless it is longer than what is left. Then the page is full. Raises RunRefused if no page of
        this size can have the line."""
        size = len(line) + 1
        if size <= self.left_bytes:
            self.left_bytes -= size
            self.lines.append(line.decode())
            return
        if not self.lines:
            raise RunRefused(
                f"limit_bytes ({self.left_bytes}) is below the size of the next line; set it to at least {size}"
            )
        self.is_full = True


def read_logs(folder: Path, actor: str | None, *, after: str, limit_bytes: int) -> LogPage:
    """Return the next lines of an actor's log, or of all logs, one actor after another, from the cursor `after` (empty:
    from the beginning), of at most `limit_bytes` with their newlines. Raises RunRefused for an unknown actor, an
    invalid cursor, and a limit below the size of the next line."""
    logs = logs_in(folder)
    known = sorted({actor_of(name) for name in logs})
    if actor is not None and actor not in known:
        listed = ", ".join(known) or "none"
        raise RunRefused(f"no log of an actor {actor[:100]!r}; actors with a log on this node: {listed}")
    positions = {name: found for name, found in _decoded(after).items() if name in logs} if after else {}
    page = _Page(left_bytes=limit_bytes)
    for name, path in logs.items():
        if actor not in (None, actor_of(name)):
            continue
        position = _added(LogReader(path, positions.get(name)), page)
        if position is not None:
            positions[name] = position
        if page.is_full:
            break
    document = {name: [position.mark, position.offset] for name, position in sorted(positions.items())}
    return LogPage(lines=tuple(page.lines), cursor=base64.urlsafe_b64encode(orjson.dumps(document)).decode())


def _added(reader: LogReader, page: _Page) -> Position | None:
    """Add the lines of a log to a page, and return the position after the last one. Raises RunRefused."""
    before = reader.position
    try:
        for line in reader.lines():
            page.add(line.raw)
            if page.is_full:
                return before
            before = reader.position
    except ValueError as error:
        raise _invalid_cursor() from error
    return reader.position


def _decoded(cursor: str) -> dict[str, Position]:
    """Return the positions in a cursor, which may come from anybody. Raises RunRefused."""
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError("too long")
        document = _CURSOR.validate_json(base64.b64decode(cursor, altchars=b"-_", validate=True), strict=True)
    except ValueError as error:
        raise _invalid_cursor() from error
    return {name: Position(*place) for name, place in document.items()}


def _invalid_cursor() -> RunRefused:
    return RunRefused("the cursor is not one of this run's logs; leave it out to begin with the oldest line")
