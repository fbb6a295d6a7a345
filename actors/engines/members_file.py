"""Reads and writes `members.json`, the list of a group's engines and their states, for its successor and operators.

Invariants:
- The file is replaced atomically, is readable by its owner only, and is written before any effect of its content.
- `time_s` is the time of writing; a dead group does not update the file.
- `incarnation` counts the groups of the run, so that routing tables of a later group are newer regardless of the clock.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter

from headrace.actors.engines.registry import EngineState, Origin
from headrace.buffer.primitives.durable_files import write_private
from headrace.policies.engine import EngineId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Status of one engine. `running` and `waiting` are numbers of requests at the last health check, None before the
    first; `breaker` is the state of its slot's circuit breaker; `reason` explains why it is not serving; `process_id`
    is set for a process on the group's host."""

    engine_id: EngineId
    origin: Origin
    place: str
    state: EngineState
    url: str
    version: str | None
    running: int | None = None
    waiting: int | None = None
    misses: int = 0
    breaker: str = "closed"
    reason: str = ""
    process_id: int | None = None

    @property
    def load(self) -> str:
        """Load as `running+waiting`, or a dash before the first health check."""
        return "-" if self.running is None else f"{self.running}+{self.waiting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Content of the members file. `started` counts the engines that were ever started; `retired` are slots that were
    removed for good; `incarnation` is the number, from 1, of the group that wrote it."""

    engines: tuple[EngineStatus, ...] = ()
    started: int = 0
    retired: frozenset[str] = field(default_factory=frozenset)
    incarnation: int = 0
    time_s: float = 0.0

    def without_loads(self) -> Roster:
        """Return what a successor and the gateway need: all but the numbers of requests."""
        engines = (replace(engine, running=None, waiting=None) for engine in self.engines)
        return replace(self, engines=tuple(engines))

    def write(self, path: Path) -> None:
        document = {
            "time_s": time.time(),
            "incarnation": self.incarnation,
            "started": self.started,
            "retired": sorted(self.retired),
            "engines": [asdict(engine) for engine in self.engines],
        }
        write_private(path, orjson.dumps(document))


_ROSTER: Final = TypeAdapter(Roster)


def read_roster(path: Path) -> Roster:
    """Return the content of a members file; an empty roster when the file is missing or damaged, so that the group
    starts new engines."""
    if not path.exists():
        return Roster()
    try:
        return _ROSTER.validate_json(path.read_bytes())
    except ValueError as error:
        logger.warning("%s is damaged (%r): it is replaced, and its engines are not taken over", path, error)
        return Roster()
