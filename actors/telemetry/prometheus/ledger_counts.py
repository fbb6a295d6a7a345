"""Counts from the ledger of a run, read incrementally.

Invariants:
- An attempt counts once, when it has ended. What was counted is forgotten once its group has ended, so memory does not
  grow with the run.
- Attempts count in the order of their ends, also when all of them are read at once: a new reader of the same ledger
  gives the same counts, with the same names behind `other`.
- A return to an older checkpoint, an operator's change and a restored ledger change what was counted: then everything
  is read again, by another object.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Any, Final

import numpy as np

from headrace.actors.record.files.running import FEW
from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.attempts import (
    EVALUATION,
    TRAIN,
    UNMEASURED,
    EndedAttempt,
    breakdown_of,
    count_description,
    count_end,
)
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.ledger_rows import (
    IN_JSON,
    End,
    EvaluationEnds,
    Key,
    all_ends,
    evaluation_attempts,
    json_of,
    training_attempts,
)
from headrace.actors.telemetry.prometheus.steps import StepCounts
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.core.records import FINAL, RolloutState
from headrace.buffer.ledger.archive import next_numbers
from headrace.buffer.trajectories.breakdown import PARTS
from headrace.buffer.trajectories.types import Cause

GROUPS_AT_ONCE: Final = 512
ATTEMPTS_AT_ONCE: Final = 512
_REPEATED: Final = (Cause.INFRA, Cause.EVALUATOR, Cause.POISON, Cause.CANCELLED)
WASTED: Final = (*_REPEATED, RolloutState.EVICTED, RolloutState.FILTERED)
"""Reasons for which an attempt was not trained."""
TASKS: Final = 2048
"""Number of tasks whose durations are remembered; those that ended longest ago are forgotten first."""
OF_A_TASK: Final = 64
OF_ALL: Final = 4096


class TypicalTimes:
    """Durations of the newest attempts that ended with a reward, in bounded memory: by task, and of all."""

    def __init__(self) -> None:
        self._by_task: OrderedDict[str, deque[float]] = OrderedDict()
        self._all: deque[float] = deque(maxlen=OF_ALL)

    def add(self, task: str, seconds: float) -> None:
        """Add an attempt."""
        of_task = self._by_task.pop(task, None) or deque(maxlen=OF_A_TASK)
        of_task.append(seconds)
        self._by_task[task] = of_task
        if len(self._by_task) > TASKS:
            self._by_task.popitem(last=False)
        self._all.append(seconds)

    def p95_s(self, task: str) -> float | None:
        """Return the 95th percentile of a task; that of all attempts if fewer than `FEW` of the task are known; None
        before the first attempt."""
        known = self._by_task.get(task, ())
        chosen = known if len(known) >= FEW else self._all
        return float(np.quantile(chosen, 0.95)) if chosen else None


def count_waste(counts: Counts, rows: JoinedRows, ended: Mapping[str, tuple[str, int]]) -> None:
    """Count the attempts of rollouts that were not trained. `ended` has the state and the last attempt of rollouts that
    can no longer change."""
    columns = ("rollout_id", "attempt", "cause", "breakdown")
    for rollout_id, number, cause, breakdown in rows.select(
        "attempts", columns, where=f"rollout_id {IN_JSON}", values=(json_of(ended),)
    ):
        state, last = ended[rollout_id]
        if number == last and state == RolloutState.TRAINED:
            continue
        # An earlier attempt failed, was cancelled, or had a result that became too stale.
        reason = state if number == last else cause if cause in _REPEATED else RolloutState.EVICTED
        parts, labels = breakdown_of(breakdown)
        attempt = EndedAttempt(
            purpose=TRAIN, cause=cause or "", ended_at_s=0.0, duration_s=0.0, parts_s=parts, labels=labels
        )
        counts.add(table.WASTED_ATTEMPTS, reason)
        counts.add(table.WASTED_TOKENS, reason, by=attempt.number("sampled_tokens"))
        counts.add(table.WASTED_SANDBOX_S, reason, by=attempt.sandbox_s)


@dataclass(slots=True)
class _Group:
    """A group that may still change, with its attempts that were counted: whether with their times."""

    task: str
    counted: dict[Key, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that has not ended, with its task and the time of its issue (Unix seconds)."""

    task: str
    issued_at_s: float


class LedgerCounts:
    """Counts of one ledger. After `update`, `counts` has what happened so far; the other attributes are of that moment:
    rollouts by state, attempts in flight, typical durations, steps, and the time of the newest end (Unix seconds; None
    before the first)."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.counts = Counts({"part": (*PARTS, UNMEASURED)})
        # Series that begin with their first event would hide it from rates and shares.
        for purpose in (TRAIN, EVALUATION):
            for cause in Cause:
                self.counts.add(table.ATTEMPTS, cause, purpose, by=0)
        for reason in WASTED:
            for metric in (table.WASTED_ATTEMPTS, table.WASTED_TOKENS, table.WASTED_SANDBOX_S):
                self.counts.add(metric, reason, by=0)
        self.typical = TypicalTimes()
        self.open: dict[Key, OpenAttempt] = {}
        self.states: Counter[str] = Counter()
        self._settled: Counter[str] = Counter()
        self._groups: dict[str, _Group] = {}
        self._next_ordinal = 0
        self._evaluations = EvaluationEnds()
        self.steps = StepCounts(self.counts)
        self.newest_end_s: float | None = None
        self._identity = _identity(database)

    def is_continued_by(self, database: sqlite3.Connection) -> bool:
        """Return whether a ledger only adds to what was read: false for another or a restored one, and after a rollback
        or an operator's change."""
        numbers = next_numbers(database)
        return (
            _identity(database) == self._identity
            and numbers["next_ordinal"] >= self._next_ordinal
            and numbers["next_commit"] >= self.steps.next_commit
        )

    def update(self, database: sqlite3.Connection, rows: JoinedRows) -> None:
        """Count what the ledger has in addition, in the current transaction of `database`."""
        begun = self._next_ordinal > 0
        new = rows.select("groups", ("group_id", "task_id"), where="ordinal >= ?", values=(self._next_ordinal,))
        self._groups |= {group_id: _Group(task) for group_id, task in new}
        self._next_ordinal = next_numbers(database)["next_ordinal"]
        self.open, self.states = {}, Counter(self._settled)
        due: list[End] = []
        groups = iter(list(self._groups))
        while some := list(islice(groups, GROUPS_AT_ONCE)):
            found = self._visit(rows, some)
            # At first, all attempts in order may be too many for memory.
            due += found if begun else ()
        evaluated = sorted(self._evaluations.new(rows))
        ends = sorted([*due, *evaluated]) if begun else merge(all_ends(rows), evaluated)
        self._count(rows, ends)
        self.steps.update(rows)

    def _visit(self, rows: JoinedRows, ids: list[str]) -> list[End]:
        """Look at groups that may have changed: return the ends that were not counted yet, and settle the groups that
        have ended."""
        text = json_of(ids)
        closed = dict(rows.select("groups", ("group_id", "closed"), where=f"group_id {IN_JSON}", values=(text,)))
        columns = ("group_id", "rollout_id", "state", "attempt")
        rollouts = {
            rollout_id: (group_id, state, attempt)
            for group_id, rollout_id, state, attempt in rows.select(
                "rollouts", columns, where=f"group_id {IN_JSON}", values=(text,)
            )
        }
        unfinished = {group_id for group_id, state, _ in rollouts.values() if state not in FINAL}
        self.states.update(state for _, state, _ in rollouts.values())
        due: list[End] = []
        of_attempts = ("rollout_id", "attempt", "issued_at_s", "ended_at_s", "cause", "breakdown NOTNULL")
        for rollout_id, number, issued_s, ended_s, cause, described in rows.select(
            "attempts", of_attempts, where=f"rollout_id {IN_JSON}", values=(json_of(rollouts),)
        ):
            group_id, key = rollouts[rollout_id][0], (rollout_id, number)
            group = self._groups[group_id]
            if ended_s is None:
                self.open[key] = OpenAttempt(group.task, issued_s)
                unfinished.add(group_id)
                continue
            counted = group.counted.get(key)
            if counted is None or (described and not counted):
                group.counted[key] = bool(described)
                due.append((ended_s, TRAIN, rollout_id, number, counted is not None))
            # Its worker may still tell where the time of a cancelled attempt went.
            if cause == Cause.CANCELLED and not described and not closed.get(group_id):
                unfinished.add(group_id)
        ended = {key: (state, last) for key, (group_id, state, last) in rollouts.items() if group_id not in unfinished}
        self._settled.update(state for state, _ in ended.values())
        count_waste(self.counts, rows, ended)
        for group_id in {*ids} - unfinished:
            del self._groups[group_id]
        return due

    def _count(self, rows: JoinedRows, ends: Iterable[End]) -> None:
        """Count attempts in this order."""
        pending = iter(ends)
        while some := list(islice(pending, ATTEMPTS_AT_ONCE)):
            trained, evaluated = (
                json_of({end[2] for end in some if end[1] == purpose}) for purpose in (TRAIN, EVALUATION)
            )
            found = dict(training_attempts(rows, trained)) | dict(evaluation_attempts(rows, evaluated))
            for _, purpose, rollout_id, number, again in some:
                attempt = found[purpose, rollout_id, number]
                if not again:
                    count_end(self.counts, attempt)
                    if attempt.purpose == TRAIN and attempt.rewarded:
                        self.typical.add(attempt.task, attempt.duration_s)
                self.newest_end_s = max(attempt.ended_at_s, self.newest_end_s or 0.0)
                if attempt.described:
                    count_description(self.counts, attempt)


def _identity(database: sqlite3.Connection) -> tuple[Any, ...]:
    """Return what changes when the ledger does more than grow."""
    run = "SELECT value FROM meta WHERE key = 'run_id'"
    query = f"SELECT ({run}), (SELECT max(epoch) FROM epochs), count(*) FROM interventions"
    return tuple(database.execute(query).fetchone())
