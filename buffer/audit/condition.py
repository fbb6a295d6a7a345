"""The current condition of a run, from its ledger: parked tasks, outages, and shares of sources.

Invariant: only small tables are read, whatever the size of the ledger, and nothing is changed.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from headrace.buffer.audit.evidence import has_begun, reading
from headrace.buffer.core.records import RolloutState
from headrace.buffer.core.source_names import ended_counter
from headrace.buffer.ledger.ledger import SOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedTask:
    """A task that is no longer issued. `parked_at_s` is Unix time; `hosts` are those on which the task has failed since
    it last finished."""

    task_id: str
    parked_at_s: float
    hosts: tuple[str, ...]
    last_failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOutage:
    """An outage that has not ended, so orders are being held back. `since_s` is Unix time."""

    component: str
    reason: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCondition:
    """Wanted and realised share of a source in the `trained` rollouts of a run; `realised` is None before the first."""

    name: str
    share: float
    trained: int
    realised: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Parked tasks, open outages and sources of a run."""

    parked: tuple[ParkedTask, ...] = ()
    outages: tuple[OpenOutage, ...] = ()
    sources: tuple[SourceCondition, ...] = ()
    """Empty in a run without sources of tasks."""


def read_condition(run_dir: Path) -> Condition:
    """Read the condition of a run, which may still be running. The result is empty if nothing has been
    recorded yet. Raises LedgerRefused."""
    if not has_begun(run_dir):
        return Condition()
    with reading(run_dir) as (database, _):
        return _read(database)


def _read(database: sqlite3.Connection) -> Condition:
    tasks = database.execute(
        "SELECT task_id, parked_at_s, (SELECT group_concat(value ->> 0, char(10)) FROM json_each(failed_on)), "
        "last_failure FROM tasks WHERE parked ORDER BY parked_at_s, task_id"
    )
    outages = database.execute(
        "SELECT component, reason, began_at_s FROM outages WHERE ended_at_s IS NULL ORDER BY number"
    )
    return Condition(
        sources=_sources(database),
        parked=tuple(
            ParkedTask(
                task_id=task_id,
                parked_at_s=parked_at_s,
                hosts=tuple((hosts or "").splitlines()),
                last_failure=last_failure,
            )
            for task_id, parked_at_s, hosts, last_failure in tasks
        ),
        outages=tuple(
            OpenOutage(component=component, reason=reason, since_s=since_s) for component, reason, since_s in outages
        ),
    )


def _sources(database: sqlite3.Connection) -> tuple[SourceCondition, ...]:
    found = database.execute("SELECT value FROM meta WHERE key = ?", (SOURCES,)).fetchone()
    shares: dict[str, float] = json.loads(found[0]) if found else {}
    counters = dict(database.execute("SELECT name, value FROM counters")) if shares else {}
    trained = {name: int(counters.get(ended_counter(name, RolloutState.TRAINED), 0)) for name in shares}
    whole = sum(trained.values())
    return tuple(
        SourceCondition(
            name=name, share=share, trained=trained[name], realised=trained[name] / whole if whole else None
        )
        for name, share in shares.items()
    )
