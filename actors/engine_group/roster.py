"""`members.json`: the engines of a group and how each is, for its successor and for operators.

Invariants:
- Replaced as a whole, and only readable by its owner. It is written before anything follows from it.
- What it says is as old as `time_s`: a group that is gone says nothing new.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import orjson

from headrace.actors.engine_group.registry import EngineState, Origin
from headrace.actors.gateway import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.policies.engine import EngineId


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
    """`started` counts the engines that the group ever started; `retired` are places that were removed for good."""

    engines: tuple[EngineStatus, ...] = ()
    started: int = 0
    retired: frozenset[str] = field(default_factory=frozenset)
    time_s: float = 0.0

    def write(self, path: Path) -> None:
        document = {
            "time_s": time.time(),
            "started": self.started,
            "retired": sorted(self.retired),
            "engines": [asdict(engine) for engine in self.engines],
        }
        write_private(path, orjson.dumps(document))


def read_roster(path: Path) -> Roster:
    """An empty one where there is none."""
    if not path.exists():
        return Roster()
    document = orjson.loads(path.read_bytes())
    return Roster(
        engines=tuple(_status(record) for record in document["engines"]),
        started=document["started"],
        retired=frozenset(document["retired"]),
        time_s=document["time_s"],
    )


def _status(record: dict[str, Any]) -> EngineStatus:
    known = {item.name for item in fields(EngineStatus)}
    values = {key: value for key, value in record.items() if key in known}
    typed = {"origin": Origin(record["origin"]), "state": EngineState(record["state"])}
    return EngineStatus(**{**values, **typed})
