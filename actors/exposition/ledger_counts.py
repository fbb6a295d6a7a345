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

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.actors.exposition import table
from headrace.actors.exposition.attempts import (
    EVALUATION,
    TRAIN,
    UNMEASURED,
    EndedAttempt,
    breakdown_of,
    count_description,
    count_end,
)
from headrace.actors.exposition.counts import Counts
from headrace.actors.exposition.typical import TypicalTimes
from headrace.buffer.breakdown import PARTS
from headrace.buffer.core.records import FINAL, RolloutState
from headrace.buffer.ledger.archive import next_numbers
from headrace.buffer.types import Cause

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Mapping

    from headrace.buffer.audit.joined_rows import JoinedRows

GROUPS_AT_ONCE: Final = 512
ATTEMPTS_AT_ONCE: Final = 512
_IN: Final = "IN (SELECT value FROM json_each(?))"

Key = tuple[str, int]
End = tuple[float, str, str, int, bool]
"""The end of an attempt: time, purpose, rollout, attempt, and whether its end was counted before, without its times."""


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
    rollouts by state, attempts in flight, typical durations, and of the newest end and commit the times (Unix seconds)
    and the staleness bound, None before the first one."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.counts = Counts({"part": (*PARTS, UNMEASURED)})
        self.typical = TypicalTimes()
        self.open: dict[Key, OpenAttempt] = {}
        self.states: Counter[str] = Counter()
        self._settled: Counter[str] = Counter()
        self._groups: dict[str, _Group] = {}
        self._next_ordinal = 0
        self._evaluated: defaultdict[str, set[Key]] = defaultdict(set)
        self._ended_tags: set[str] = set()
        self._next_commit = 1
        self.newest_end_s: float | None = None
        self.newest_commit_s: float | None = None
        self.max_staleness: int | None = None
        self._identity = _identity(database)

    def is_continued_by(self, database: sqlite3.Connection) -> bool:
        """Return whether a ledger only adds to what was read: false for another or a restored one, and after a rollback
        or an operator's change."""
        numbers = next_numbers(database)
        return (
            _identity(database) == self._identity
            and numbers["next_ordinal"] >= self._next_ordinal
            and numbers["next_commit"] >= self._next_commit
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
        evaluated = sorted(self._visit_evaluations(rows))
        ends = sorted([*due, *evaluated]) if begun else merge(_all_ends(rows), evaluated)
        self._count(rows, ends)
        self._count_steps(rows)

    def _visit(self, rows: JoinedRows, ids: list[str]) -> list[End]:
        """Look at groups that may have changed: return the ends that were not counted yet, and settle the groups that
        have ended."""
        text = _json(ids)
        closed = dict(rows.select("groups", ("group_id", "closed"), where=f"group_id {_IN}", values=(text,)))
        columns = ("group_id", "rollout_id", "state", "attempt")
        rollouts = {
            rollout_id: (group_id, state, attempt)
            for group_id, rollout_id, state, attempt in rows.select(
                "rollouts", columns, where=f"group_id {_IN}", values=(text,)
            )
        }
        unfinished = {group_id for group_id, state, _ in rollouts.values() if state not in FINAL}
        self.states.update(state for _, state, _ in rollouts.values())
        due: list[End] = []
        columns = (
            "rollout_id",
            "attempt",
            "issued_at_s",
            "ended_at_s",
            "cause",
            "breakdown NOTNULL OR phases_s != '[]'",
        )
        for rollout_id, number, issued_s, ended_s, cause, described in rows.select(
            "attempts", columns, where=f"rollout_id {_IN}", values=(_json(list(rollouts)),)
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
        self._settle(rows, ended)
        for group_id in {*ids} - unfinished:
            del self._groups[group_id]
        return due

    def _settle(self, rows: JoinedRows, ended: Mapping[str, tuple[str, int]]) -> None:
        """Count the states of rollouts that can no longer change, and their attempts that were not trained. `ended` has
        state and last attempt by rollout."""
        self._settled.update(state for state, _ in ended.values())
        columns = ("rollout_id", "attempt", "cause", "breakdown", "phases_s")
        for rollout_id, number, cause, breakdown, phases in rows.select(
            "attempts", columns, where=f"rollout_id {_IN}", values=(_json(list(ended)),)
        ):
            state, last = ended[rollout_id]
            if number == last and state == RolloutState.TRAINED:
                continue
            # An earlier attempt failed, was cancelled, or had a result that became too stale.
            reason = state if number == last else cause if cause in _REPEATED else RolloutState.EVICTED
            parts, labels = breakdown_of(breakdown, phases)
            attempt = EndedAttempt(
                purpose=TRAIN, cause=cause or "", ended_at_s=0.0, duration_s=0.0, parts_s=parts, labels=labels
            )
            self.counts.add(table.WASTED_ATTEMPTS, reason)
            self.counts.add(table.WASTED_TOKENS, reason, by=attempt.number("sampled_tokens"))
            self.counts.add(table.WASTED_SANDBOX_S, reason, by=attempt.sandbox_s)

    def _visit_evaluations(self, rows: JoinedRows) -> Iterator[End]:
        """Yield the answers of evaluations that were not counted yet."""
        over = {tag for (tag,) in rows.select("ended_evaluations", ("tag",))}
        tags = over | {tag for (tag,) in rows.select("evaluations", ("DISTINCT tag",))}
        columns = ("recorded_at_s", "rollout_id", "attempt", "tag")
        for at_s, rollout_id, attempt, tag in rows.select(
            "evaluations", columns, where=f"tag {_IN}", values=(_json(sorted(tags - self._ended_tags)),)
        ):
            if (rollout_id, attempt) not in self._evaluated[tag]:
                self._evaluated[tag].add((rollout_id, attempt))
                yield at_s, EVALUATION, rollout_id, attempt, False
        self._ended_tags |= over
        for tag in over:
            self._evaluated.pop(tag, None)

    def _count(self, rows: JoinedRows, ends: Iterable[End]) -> None:
        """Count attempts in this order."""
        pending = iter(ends)
        while some := list(islice(pending, ATTEMPTS_AT_ONCE)):
            trained, evaluated = (
                _json(sorted({end[2] for end in some if end[1] == purpose})) for purpose in (TRAIN, EVALUATION)
            )
            found = dict(_training_attempts(rows, trained)) | dict(_evaluation_attempts(rows, evaluated))
            for _, purpose, rollout_id, number, again in some:
                attempt = found[purpose, rollout_id, number]
                if not again:
                    count_end(self.counts, attempt)
                    if attempt.purpose == TRAIN and attempt.rewarded:
                        self.typical.add(attempt.task, attempt.duration_s)
                self.newest_end_s = max(attempt.ended_at_s, self.newest_end_s or 0.0)
                if attempt.described:
                    count_description(self.counts, attempt)

    def _count_steps(self, rows: JoinedRows) -> None:
        opened = sorted(at_s for (at_s,) in rows.select("epochs", ("opened_at_s",)))
        columns = ("sequence", "batch_id", "skipped", "committed_at_s", "rolled_back_by", "max_staleness")
        commits = iter(
            sorted(rows.select("commits", columns, where="sequence >= ?", values=(self._next_commit,)).fetchall())
        )
        while some := list(islice(commits, ATTEMPTS_AT_ONCE)):
            ids = _json([commit[1] for commit in some])
            leases = {
                batch_id: (leased_at_s, members)
                for batch_id, leased_at_s, members in rows.select(
                    "batches", ("batch_id", "leased_at_s", "members"), where=f"batch_id {_IN}", values=(ids,)
                )
            }
            for sequence, batch_id, skipped, committed_at_s, rolled_back_by, bound in some:
                self.counts.add(table.STEPS, "skipped" if skipped else "updated")
                self.counts.add(table.STEPS_ROLLED_BACK, by=float(rolled_back_by is not None))
                leased_at_s, members = leases[batch_id]
                for _, _, staleness in orjson.loads(members):
                    self.counts.observe(table.TRAINED_STALENESS, value=staleness)
                epoch_s = max((at_s for at_s in opened if at_s <= leased_at_s), default=leased_at_s)
                free_at_s = max(self.newest_commit_s or epoch_s, epoch_s)
                begun_s = max(leased_at_s, free_at_s)
                self.counts.add(table.LEARNER_S, "waiting", by=begun_s - free_at_s)
                self.counts.add(table.LEARNER_S, "stepping", by=max(0.0, committed_at_s - begun_s))
                self.newest_commit_s, self.max_staleness, self._next_commit = committed_at_s, bound, sequence + 1


_REPEATED: Final = (Cause.INFRA, Cause.EVALUATOR, Cause.POISON, Cause.CANCELLED)


def _all_ends(rows: JoinedRows) -> Iterator[End]:
    columns = ("ended_at_s", f"'{TRAIN}'", "rollout_id", "attempt", "0")
    return iter(rows.select("attempts", columns, where="ended_at_s NOTNULL", order="ended_at_s, rollout_id, attempt"))


def _training_attempts(rows: JoinedRows, ids: str) -> Iterator[tuple[tuple[str, str, int], EndedAttempt]]:
    """Return the ended attempts of rollouts, by purpose, rollout and number."""
    groups = dict(rows.select("rollouts", ("rollout_id", "group_id"), where=f"rollout_id {_IN}", values=(ids,)))
    named = _json(sorted({*groups.values()}))
    tasks = dict(rows.select("groups", ("group_id", "task_id"), where=f"group_id {_IN}", values=(named,)))
    columns = (
        *("rollout_id", "attempt", "issued_at_s", "ended_at_s", "cause", "reward", "turns", "phases_s", "trace_id"),
        *("host", "breakdown"),
    )
    for rollout_id, number, issued_s, ended_s, cause, reward, turns, phases, trace_id, host, breakdown in rows.select(
        "attempts", columns, where=f"rollout_id {_IN} AND ended_at_s NOTNULL", values=(ids,)
    ):
        parts, labels = breakdown_of(breakdown, phases)
        yield (
            (TRAIN, rollout_id, number),
            EndedAttempt(
                purpose=TRAIN,
                cause=cause or "unknown",
                ended_at_s=ended_s,
                duration_s=max(0.0, ended_s - issued_s),
                task=tasks[groups[rollout_id]],
                host=host,
                trace_id=trace_id,
                turns=turns,
                rewarded=reward is not None,
                parts_s=parts,
                labels=labels,
            ),
        )


def _evaluation_attempts(rows: JoinedRows, ids: str) -> Iterator[tuple[tuple[str, str, int], EndedAttempt]]:
    columns = ("rollout_id", "attempt", "task_id", "cause", "recorded_at_s", "host", "trace_id", "breakdown")
    for rollout_id, number, task, cause, at_s, host, trace_id, breakdown in rows.select(
        "evaluations", columns, where=f"rollout_id {_IN}", values=(ids,)
    ):
        parts, labels = breakdown_of(breakdown, "[]")
        yield (
            (EVALUATION, rollout_id, number),
            EndedAttempt(
                purpose=EVALUATION,
                cause=cause,
                ended_at_s=at_s,
                duration_s=sum(parts.values()),
                task=task,
                host=host,
                trace_id=trace_id,
                parts_s=parts,
                labels=labels,
            ),
        )


def _identity(database: sqlite3.Connection) -> tuple[Any, ...]:
    """Return what changes when the ledger does more than grow."""
    run = "SELECT value FROM meta WHERE key = 'run_id'"
    query = f"SELECT ({run}), (SELECT max(epoch) FROM epochs), count(*) FROM interventions"
    return tuple(database.execute(query).fetchone())


def _json(values: list[str]) -> str:
    return orjson.dumps(values).decode()
