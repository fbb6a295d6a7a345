"""Counters and histograms of a run, folded from its ledger.

Invariants:
- Files are only read, each time in one transaction; what an error leaves half folded is dropped.
- An attempt counts once, when it has ended. Where its time went may be known later, and counts then, once. Whether it
  was wasted counts when its group has ended. What was counted is forgotten once the group has ended, so memory does not
  grow with the run.
- Attempts count in the ledger's order of their ends, also when all of them are read at once: a new fold of the same
  ledger gives the same counts, with the same names behind `other`.
- Rows are only added, but for a return to an older checkpoint, an operator's change and a restored ledger: then another
  object folds everything again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.series import Series, plain_value
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import Attempt, JoinedRows
from headrace.buffer.core.epochs import EPOCHS_RESERVED
from headrace.buffer.core.records import FINAL, RolloutState
from headrace.buffer.core.source_names import SEPARATOR
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.archive import closed_rollouts, next_numbers, totals_of
from headrace.buffer.ledger.schema import NEWEST_END
from headrace.buffer.trajectories.breakdown import OFFER, OTHER, PARTS, QUEUE, Label, is_of_agent
from headrace.buffer.trajectories.types import Cause, Purpose

UNMEASURED: Final = "unmeasured"
"""Value of the label `part` for the part `other` of a breakdown: `other` sums the values beyond a label's limit."""
PROVIDER: Final = "headrace"
"""Value of `gen_ai.provider.name`."""
UNIT: Final = 2.0**-20
"""Sums of multiples of this power of two are exact below 2**33, whatever their order. So a new fold gives no sum that
is lower by a rounding error, which Prometheus would take for a restart from zero."""
AT_ONCE: Final = 512
"""Number of groups or steps whose rows are in memory at once."""
_FAILED: Final = (Cause.INFRA, Cause.EVALUATOR, Cause.POISON)
_REPEATED: Final = (*_FAILED, Cause.CANCELLED)
WASTED: Final = (*_REPEATED, RolloutState.EVICTED, RolloutState.FILTERED)
"""Reasons for which an attempt was not trained."""
_THESE: Final = "IN (SELECT value FROM json_each(?))"

logger = logging.getLogger(__name__)


def breakdown_of(breakdown: str | None) -> tuple[dict[str, float], dict[str, Label]]:
    """Return the parts (seconds) and labels of a row, never negative. A damaged breakdown counts as none, a
    damaged number as 0."""
    if breakdown is None:
        return {}, {}
    try:
        document: dict[str, Any] = orjson.loads(breakdown)
        return {part: number(seconds) for part, seconds in document["parts_s"].items()}, dict(document["labels"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}, {}


def number(value: object) -> float:
    """Return a number of at least 0, cut to a multiple of `UNIT`; 0 for what is no finite number."""
    return max(0, int(value / UNIT)) * UNIT if isinstance(value, int | float) and isfinite(value) else 0.0


def sandbox_s(parts: Mapping[str, float]) -> float:
    """Return the seconds with a sandbox: everything but waiting for a place and for the buffer."""
    return sum(seconds for part, seconds in parts.items() if part not in (QUEUE, OFFER))


class LedgerFold:
    """Fold of one ledger. `series` has what happened so far. The other attributes are the time of the newest end, that
    of the newest commit (Unix seconds), and the staleness bound in force at it; each is None before the first."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.series = Series({"part": (*PARTS, UNMEASURED)})
        # Series that begin with their first event would hide it from rates and shares.
        for purpose in Purpose:
            for cause in Cause:
                self.series.of(table.ATTEMPTS, cause, purpose)
        for reason in WASTED:
            for metric in (table.WASTED_ATTEMPTS, table.WASTED_TOKENS, table.WASTED_SANDBOX_S):
                self.series.of(metric, reason)
        for outcome in ("updated", "skipped"):
            self.series.of(table.STEPS, outcome)
        self.series.of(table.STEPS_ROLLED_BACK)
        self.newest_end_s: float | None = None
        self.newest_commit_s: float | None = None
        self.max_staleness: int | None = None
        self._open: set[str] = set()
        """Groups that may still change."""
        self._undescribed: defaultdict[str, set[int]] = defaultdict(set)
        """Cancelled attempts in them, by rollout, whose worker may still tell where the time went."""
        self._numbers = {"next_ordinal": 0, "next_commit": 1, NEWEST_END: 0}
        """Totals and next numbers of the ledger when it was read last; they only grow while it only grows."""
        self._identity = _identity(database)

    def is_continued_by(self, database: sqlite3.Connection) -> bool:
        """Return whether a ledger only adds to what was read: false for another or a restored one, and after a rollback
        or an operator's change."""
        numbers = totals_of(database) | next_numbers(database)
        grows = all(numbers.get(name, 0) >= number for name, number in self._numbers.items())
        return grows and _identity(database) == self._identity

    def update(self, database: sqlite3.Connection, rows: JoinedRows) -> None:
        """Count what the ledger has in addition, in the current transaction of `database`."""
        known, self._numbers = self._numbers, totals_of(database) | next_numbers(database)
        new = rows.select("groups", ("group_id",), where="ordinal >= ?", values=(known["next_ordinal"],))
        self._open.update(group_id for (group_id,) in new)
        for end in rows.ends_of(self._undescribed):
            if end.breakdown is not None and end.attempt in self._undescribed[end.rollout_id]:
                self._undescribed[end.rollout_id].remove(end.attempt)
                self._count(end, again=True)
        for end in rows.ends(known[NEWEST_END]):
            self._count(end)
            if end.cause == Cause.CANCELLED and end.breakdown is None and end.purpose == Purpose.TRAIN:
                self._undescribed[end.rollout_id].add(end.attempt)
        groups = iter(sorted(self._open))
        while some := list(islice(groups, AT_ONCE)):
            self._count_ended_groups(rows, some)
        self._count_steps(rows, known["next_commit"])

    def _count_ended_groups(self, rows: JoinedRows, ids: list[str]) -> None:
        """Count the waste of the groups that have ended, and forget them."""
        these = (_json(ids),)
        closed = dict(rows.select("groups", ("group_id", "closed"), where=f"group_id {_THESE}", values=these))
        columns = ("rollout_id", "group_id", "state", "attempt")
        members = rows.select("rollouts", columns, where=f"group_id {_THESE}", values=these).fetchall()
        unfinished = {
            group_id
            for rollout_id, group_id, state, _ in members
            if state not in FINAL or (self._undescribed.get(rollout_id) and not closed.get(group_id))
        }
        ended = {rollout_id: rest for rollout_id, group_id, *rest in members if group_id not in unfinished}
        for end in rows.ends_of(ended):
            state, last = ended[end.rollout_id]
            self._undescribed.pop(end.rollout_id, None)
            self._count_waste(end, state if end.attempt == last else None)
        self._open -= {*ids} - unfinished

    def _count(self, end: Attempt, *, again: bool = False) -> None:
        """Count an attempt: its end, unless that was counted before, and its breakdown."""
        of, purpose, cause, ended_s = self.series.of, end.purpose, end.cause, end.ended_at_s or 0.0
        exemplar = {"trace_id": plain_value(end.trace_id)} if end.trace_id else None
        parts, labels = breakdown_of(end.breakdown)
        if not again:
            began_s = end.issued_at_s
            of(table.ATTEMPTS, cause, purpose).inc()
            duration_s = sum(parts.values()) if began_s is None else number(ended_s - began_s)
            of(table.ATTEMPT_S, purpose).observe(duration_s, exemplar)
        self.newest_end_s = max(ended_s, self.newest_end_s or 0.0)
        if not parts:
            return
        for part, seconds in parts.items():
            of(table.PART_S, UNMEASURED if part == OTHER else part, purpose).observe(seconds, exemplar)
        if end.host:
            of(table.HOST_ATTEMPTS, end.host, cause).inc()
        engines: Any = labels.get("engines")
        for engine in engines if isinstance(engines, list) else ():
            of(table.ENGINE_ATTEMPTS, str(engine)).inc()
        for kind in ("prompt", "cached", "sampled"):
            of(table.TOKENS_USED, kind, purpose).inc(number(labels.get(f"{kind}_tokens")))
        of(table.RETRACTIONS).inc(number(labels.get("retractions")))
        of(table.SANDBOX_S, purpose).inc(sandbox_s(parts))
        of(table.SANDBOX_CPU_S, purpose).inc(number(labels.get("cpu_s")))
        if "warm" in labels:
            of(table.BOOTS, str(bool(labels["warm"])).lower()).inc()
            of(table.BOOT_TRIES).inc(number(labels.get("boot_tries")))
        agent_s = sum(seconds for part, seconds in parts.items() if is_of_agent(part))
        if not agent_s:
            return
        agent, error = str(labels.get("agent", "")), cause if cause in _FAILED else ""
        of(table.INVOKE_AGENT_S, agent, error).observe(agent_s, exemplar)
        of(table.INFERENCE_CALLS, agent).observe(number(labels.get("turns")) or end.turns, exemplar)
        for kind, label in (("input", "prompt_tokens"), ("output", "sampled_tokens")):
            if label in labels:
                tokens = number(labels[label])
                of(table.TOKEN_USAGE, "invoke_agent", PROVIDER, kind).observe(tokens, exemplar)

    def _count_waste(self, end: Attempt, state: str | None) -> None:
        """Count an attempt of an ended group if it was not trained. `state` is that of its rollout if it is the last
        attempt, else None."""
        if state == RolloutState.TRAINED:
            return
        # An earlier attempt failed, was cancelled, or had a result that became too stale.
        reason = state or (end.cause if end.cause in _REPEATED else RolloutState.EVICTED)
        parts, labels = breakdown_of(end.breakdown)
        self.series.of(table.WASTED_ATTEMPTS, reason).inc()
        self.series.of(table.WASTED_TOKENS, reason).inc(number(labels.get("sampled_tokens")))
        self.series.of(table.WASTED_SANDBOX_S, reason).inc(sandbox_s(parts))

    def _count_steps(self, rows: JoinedRows, first: int) -> None:
        """Count the steps from the one with number `first` on."""
        of = self.series.of
        opened = sorted(at_s for (at_s,) in rows.select("epochs", ("opened_at_s",)))
        columns = ("sequence", "batch_id", "skipped", "committed_at_s", "rolled_back_by", "max_staleness")
        commits = iter(sorted(rows.select("commits", columns, where="sequence >= ?", values=(first,))))
        while some := list(islice(commits, AT_ONCE)):
            ids = (_json([commit[1] for commit in some]),)
            of_batch = ("batch_id", "leased_at_s", "members")
            found = rows.select("batches", of_batch, where=f"batch_id {_THESE}", values=ids)
            batches = {batch_id: (leased_s, members) for batch_id, leased_s, members in found}
            for _, batch_id, skipped, committed_s, rolled_back_by, bound in some:
                of(table.STEPS, "skipped" if skipped else "updated").inc()
                of(table.STEPS_ROLLED_BACK).inc(rolled_back_by is not None)
                # A lost archive has taken the batch with it.
                leased_s, members = batches.get(batch_id, (committed_s, "[]"))
                for _, _, staleness in orjson.loads(members):
                    of(table.TRAINED_STALENESS).observe(staleness)
                # Between two incarnations of the learner nobody waits.
                opened_s = max((at_s for at_s in opened if at_s <= leased_s), default=leased_s)
                free_s = max(self.newest_commit_s or opened_s, opened_s)
                begun_s = max(leased_s, free_s)
                of(table.LEARNER_S, "waiting").inc(number(begun_s - free_s))
                of(table.LEARNER_S, "stepping").inc(number(committed_s - begun_s))
                self.newest_commit_s, self.max_staleness = committed_s, bound


def state_of(fold: LedgerFold, database: sqlite3.Connection, rows: JoinedRows) -> Series:
    """Return what the ledger says of this moment, and its own counters."""
    of = (series := Series()).of
    states = dict(database.execute("SELECT state, count(*) FROM main.rollouts GROUP BY state"))
    archived = closed_rollouts(totals_of(database))
    for state in RolloutState:
        of(table.ROLLOUTS, state).set(states.get(state, 0) + archived.get(state, 0))
    events = database.execute("SELECT name, value FROM main.counters ORDER BY name")
    # The ledger has a counter from its first event, which a series that begins with it would hide from rates.
    for name, value in ({"rollouts_evicted": 0, "rollouts_reissued": 0} | dict(events)).items():
        if SEPARATOR not in name and name != EPOCHS_RESERVED:
            of(table.EVENTS, name).inc(value)
    outages = "SELECT component, count(*), sum(ended_at_s IS NULL) FROM main.outages GROUP BY component"
    for component, times, still_open in database.execute(outages):
        of(table.OUTAGES, component).inc(times)
        of(table.OUTAGE_OPEN, component).inc(still_open > 0)
    saved_s = (at_s for (at_s,) in rows.select("checkpoints", ("max(recorded_at_s)",)) if at_s is not None)
    for metric, newest in (
        (table.NEWEST_CHECKPOINT, max(saved_s, default=None)),
        (table.NEWEST_END, fold.newest_end_s),
        (table.NEWEST_COMMIT, fold.newest_commit_s),
        (table.MAX_STALENESS, fold.max_staleness),
    ):
        if newest is not None:
            of(metric).set(newest)
    return series


class LedgerReader:
    """Reader of the ledger in a folder. After `update`, `series` has what happened so far and what is now, both of the
    same moment; None while the ledger cannot be read."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fold: LedgerFold | None = None
        self._told = ""
        self.series: tuple[Series, Series] | None = None

    def update(self) -> None:
        """Read what is new. A ledger that cannot be read is named in the log, once."""
        fold, self._fold, self.series = self._fold, None, None
        try:
            with reading(self._run_dir) as (database, archive):
                attached, damage = begin_with_archive(database, archive)
                # What a lost archive had may come back.
                if fold is None or self._told or not fold.is_continued_by(database):
                    fold = LedgerFold(database)
                rows = JoinedRows(database, attached=attached)
                fold.update(database, rows)
                self._fold, self.series = fold, (state_of(fold, database, rows), fold.series)
        except (LedgerRefused, sqlite3.DatabaseError) as error:
            damage = [str(error)]
        told = "; ".join(damage)
        if told and told != self._told:
            logger.warning("metrics of %s lack what the ledger does not give: %s", self._run_dir, told)
        self._told = told


def _json(values: Collection[str]) -> str:
    """Return values as the argument of `_THESE`."""
    return orjson.dumps(list(values)).decode()


def _identity(database: sqlite3.Connection) -> tuple[Any, ...]:
    """Return what changes when the ledger does more than grow."""
    run = "SELECT value FROM meta WHERE key = 'run_id'"
    query = f"SELECT ({run}), (SELECT max(epoch) FROM epochs), count(*) FROM interventions"
    return tuple(database.execute(query).fetchone())
