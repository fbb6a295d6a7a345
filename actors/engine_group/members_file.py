"""`members.json`: the engines of a group and how each is, for its successor and for operators.

Invariants:
- Replaced as a whole, and only readable by its owner. It is written before anything follows from it.
- What it says is as old as `time_s`: a group that is gone says nothing new.
- `incarnation` counts the groups of the run: routing tables of a later one are newer, whatever the clock says.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import orjson

from headrace.actors.engine_group.registry import EngineState, Origin
from headrace.buffer.primitives.durable_files import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.policies.engine import EngineId


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine. `running` and `waiting` are numbers of requests at the last health check, None before the first;
    `breaker` says whether it may be tried again; `reason` why it does not serve; `process_id` is that of a process of
    ours on the group's host."""

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
        """`running+waiting`, or a dash."""
        return "-" if self.running is None else f"{self.running}+{self.waiting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """`started` counts the engines that the group ever started; `retired` are places that were removed for good;
    `incarnation` is the number of the group that wrote it, from 1."""

    engines: tuple[EngineStatus, ...] = ()
    started: int = 0
    retired: frozenset[str] = field(default_factory=frozenset)
    incarnation: int = 0
    time_s: float = 0.0

    def write(self, path: Path) -> None:
        document = {
            "time_s": time.time(),
            "incarnation": self.incarnation,
            "started": self.started,
            "retired": sorted(self.retired),
            "engines": [asdict(engine) for engine in self.engines],
        }
        write_private(path, orjson.dumps(document))


def read_roster(path: Path) -> Roster:
    """An empty one where there is none, or none that can be read: the group then starts new engines."""
    if not path.exists():
        return Roster()
    try:
        return _roster(orjson.loads(path.read_bytes()))
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("%s is damaged (%r): it is written anew, and its engines are not taken over", path, error)
        return Roster()


def _roster(document: dict[str, Any]) -> Roster:
    return Roster(
        engines=tuple(_status(record) for record in document["engines"]),
        started=document["started"],
        retired=frozenset(document["retired"]),
        # Rosters of the first versions do not count.
        incarnation=document.get("incarnation", 0),
        time_s=document["time_s"],
    )


def _status(record: dict[str, Any]) -> EngineStatus:
    known = {item.name for item in fields(EngineStatus)}
    values = {key: value for key, value in record.items() if key in known}
    typed = {"origin": Origin(record["origin"]), "state": EngineState(record["state"])}
    return EngineStatus(**{**values, **typed})
