"""The rows of a ledger and its archive, joined for readers.

Invariants:
- A row of the ledger overrides the archive's row of the same key, and a group in the ledger overrides all rows of the
  same group in the archive. Rows of the archive whose number the ledger has not assigned yet do not count (see
  `archive`).
- The ledger is read before the archive: rows that are moved in between appear in both.
- Only requested rows are held in memory: `histories` reads a few groups at a time.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from headrace.buffer.core.records import AttemptRecord, GroupRecord, RolloutRecord
from headrace.buffer.ledger.archive import next_numbers, totals_of
from headrace.buffer.ledger.schema import NEWEST_END, TABLES
from headrace.buffer.trajectories.types import GroupId, Purpose, RolloutId

R = TypeVar("R")

GROUPS_AT_ONCE: Final = 512
ORDER_OF_SEALING: Final = "seal_order IS NULL, seal_order, ordinal"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """A group, its members by number, and all attempts of each member in order."""

    group: GroupRecord
    members: Sequence[RolloutRecord]
    attempts: Mapping[RolloutId, Sequence[AttemptRecord]]

    def current(self, rollout: RolloutRecord) -> AttemptRecord | None:
        """Return a member's current attempt; None before its first attempt."""
        tries = self.attempts.get(rollout.rollout_id, ())
        return next((attempt for attempt in tries if attempt.attempt == rollout.attempt), None)

    def first_result(self, rollout: RolloutRecord) -> AttemptRecord | None:
        """Return a member's first attempt that has a reward."""
        tries = self.attempts.get(rollout.rollout_id, ())
        return next((attempt for attempt in tries if attempt.reward is not None), None)


def histories_of(
    groups: Iterable[GroupRecord], rollouts: Iterable[RolloutRecord], attempts: Iterable[AttemptRecord]
) -> Iterator[GroupHistory]:
    """Yield each group with its members and attempts. Attempts must come in order."""
    tries: dict[RolloutId, list[AttemptRecord]] = {}
    for attempt in attempts:
        tries.setdefault(attempt.rollout_id, []).append(attempt)
    members: dict[GroupId, list[RolloutRecord]] = {}
    for rollout in rollouts:
        members.setdefault(rollout.group_id, []).append(rollout)
    for group in groups:
        of_group = sorted(members.get(group.group_id, ()), key=lambda rollout: rollout.member)
        yield GroupHistory(
            group=group,
            members=of_group,
            attempts={one.rollout_id: tries[one.rollout_id] for one in of_group if one.rollout_id in tries},
        )


class Attempt(NamedTuple):
    """An attempt of training or evaluation (`purpose`), as its readers see it. `sequence` is the number of its end, 0
    while it runs; of an evaluation `issued_at_s` is None; `breakdown` is JSON, or None if nobody told where the time
    went."""

    sequence: int
    purpose: str
    rollout_id: str
    attempt: int
    version: str
    issued_at_s: float | None
    ended_at_s: float | None
    cause: str
    turns: int
    trace_id: str
    host: str
    charged_to: str | None
    breakdown: str | None

    @property
    def began_at_s(self) -> float:
        """Time before which nothing of it happened, as far as is known; also if a clock was set meanwhile."""
        try:
            wall_s = float(json.loads(self.breakdown or "{}")["wall_s"])
        except (KeyError, TypeError, ValueError):
            wall_s = 0.0
        ended_s = math.inf if self.ended_at_s is None else self.ended_at_s
        return min(ended_s if self.issued_at_s is None else self.issued_at_s, ended_s - wall_s)


_KEY: Final = "coalesce(end_sequence, 0), '{}', rollout_id, attempt, version, "
_ATTEMPTS: Final = {
    Purpose.TRAIN: (
        "attempts",
        f"{_KEY.format(Purpose.TRAIN)} issued_at_s, ended_at_s, coalesce(cause, ''), turns, trace_id, host, charged_to",
    ),
    Purpose.EVALUATION: (
        "evaluations",
        f"{_KEY.format(Purpose.EVALUATION)} NULL, recorded_at_s, cause, 0, trace_id, host, NULL",
    ),
}
"""Table, and columns of `Attempt` before `breakdown`, by purpose."""


class JoinedRows:
    """Rows read through an open connection that is in a transaction. The connection's `main` database is the ledger;
    the archive is attached as `archive`."""

    def __init__(self, database: sqlite3.Connection, *, attached: bool) -> None:
        self._database = database
        self._archived = _archived(next_numbers(database)) if attached else {}

    def of(self, kind: type[R], order: str = "") -> Iterator[R]:
        """Yield all records of a kind."""
        table = TABLES[kind]
        for row in self.select(table.name, table.columns, order=order):
            yield table.load(row)  # type: ignore[misc]

    def select(
        self,
        table: str,
        columns: Iterable[str],
        *,
        where: str = "true",
        order: str = "",
        values: tuple[object, ...] = (),
    ) -> sqlite3.Cursor:
        """Select these columns of all rows."""
        names = ", ".join(columns)
        query = f"SELECT {names} FROM main.{table} WHERE {where}"
        if table in self._archived:
            query += f" UNION ALL SELECT {names} FROM archive.{table} WHERE {where} AND {self._archived[table]}"
            values = values * 2
        if order:
            # A compound query can only be ordered by column names, from outside.
            query = f"SELECT * FROM ({query}) ORDER BY {order}"
        return self._database.execute(query, values)

    def attempts(self, purpose: Purpose) -> Iterator[Attempt]:
        """Yield all attempts of a purpose in no order."""
        table, first = _ATTEMPTS[purpose]
        return map(Attempt._make, self.select(table, (first, "breakdown")))

    def ends(self, after: int = 0) -> Iterator[Attempt]:
        """Yield the attempts that ended after the one with number `after`, in order; only what is taken is read."""
        return self._ends("end_sequence > ?", after)

    def ends_of(self, rollouts: Iterable[str]) -> Iterator[Attempt]:
        """Yield the attempts of these rollouts that have ended, in order."""
        # The plus sign keeps SQLite from searching among all ends.
        return self._ends(
            "+end_sequence NOTNULL AND rollout_id IN (SELECT value FROM json_each(?))", json.dumps([*rollouts])
        )

    def _ends(self, where: str, value: object) -> Iterator[Attempt]:
        # The order of a compound query needs the name of a column.
        found = (
            self.select(table, (first, "breakdown", "end_sequence"), where=where, order="end_sequence", values=(value,))
            for table, first in _ATTEMPTS.values()
        )
        return merge(*((Attempt._make(row[:-1]) for row in rows) for rows in found))

    def newest_end(self) -> int:
        """Return the number of the newest end; 0 before the first."""
        return totals_of(self._database)[NEWEST_END]

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        (number,) = self._database.execute(f"SELECT count(*) FROM main.{table}").fetchone()
        if table in self._archived:
            archived = f"SELECT count(*) FROM archive.{table} WHERE {self._archived[table]}"
            number += self._database.execute(archived).fetchone()[0]
        return int(number)

    def histories(self) -> Iterator[GroupHistory]:
        """Yield all groups in the order of sealing; unsealed groups come last."""
        groups = self.of(GroupRecord, ORDER_OF_SEALING)
        while some := list(islice(groups, GROUPS_AT_ONCE)):
            ids = json.dumps([group.group_id for group in some])
            rollouts = list(self._of_these(RolloutRecord, "group_id", ids))
            ids = json.dumps([rollout.rollout_id for rollout in rollouts])
            yield from histories_of(some, rollouts, self._of_these(AttemptRecord, "rollout_id", ids))

    def _of_these(self, kind: type[R], key: str, ids: str) -> Iterator[R]:
        table = TABLES[kind]
        where = f"{key} IN (SELECT value FROM json_each(?))"
        for row in self.select(table.name, table.columns, where=where, order=", ".join(table.key), values=(ids,)):
            yield table.load(row)  # type: ignore[misc]


def _archived(numbers: dict[str, int]) -> dict[str, str]:
    """Return, by table, the condition that selects the archive's rows that count."""
    future = f"SELECT group_id FROM archive.groups WHERE ordinal >= {numbers['next_ordinal']}"
    not_these = f"SELECT group_id FROM main.groups UNION {future}"
    rollouts = (
        "SELECT rollout_id FROM main.rollouts "
        f"UNION SELECT rollout_id FROM archive.rollouts WHERE group_id IN ({future})"
    )
    return {
        "groups": f"group_id NOT IN ({not_these})",
        "rollouts": f"group_id NOT IN ({not_these})",
        "attempts": f"rollout_id NOT IN ({rollouts})",
        "batches": f"batch_id NOT IN (SELECT batch_id FROM main.batches) AND ordinal < {numbers['next_batch']}",
        "commits": f"sequence NOT IN (SELECT sequence FROM main.commits) AND sequence < {numbers['next_commit']}",
        "checkpoints": "version NOT IN (SELECT version FROM main.checkpoints)",
        "evaluations": "(rollout_id, attempt) NOT IN (SELECT rollout_id, attempt FROM main.evaluations)",
        "ended_evaluations": "tag NOT IN (SELECT tag FROM main.ended_evaluations)",
    }
