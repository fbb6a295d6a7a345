"""The tables of the ledger, and the conversion of records to rows.

Invariants:
- There is one table for each kind of record; columns have the names of the record's fields. Versions are text
  (`epoch.step`), structures are JSON.
- `timeline` is the last column: SQLite reads what comes before it without its kilobytes.
- An attempt gets its `end_sequence` in the transaction of its end, and keeps it: readers ask for what is above the
  number that they have read. The numbers of training and evaluation are one sequence, which no clock turns back. They
  begin at the Unix time of the end in microseconds: a ledger that was restored from a copy gives no number again.
- A file of another schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.buffer.core.records import (
    AttemptRecord,
    BatchMember,
    BatchRecord,
    BatchState,
    Charge,
    CheckpointRecord,
    CommitRecord,
    Component,
    CounterRecord,
    EpochRecord,
    EvaluationRecord,
    FilterReason,
    GroupRecord,
    GroupState,
    HostFailures,
    InterventionRecord,
    OperatorAction,
    OutageRecord,
    Record,
    RolloutRecord,
    RolloutState,
    TaskRecord,
    VersionTokens,
)
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.step_scores import StepScores
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion

SCHEMA_VERSION = 1
STAMP = (0x48524C47, SCHEMA_VERSION)
"""`HRLG`, and the number of the schema: this SQLite file is a ledger."""

NEWEST_END = "newest_end"
"""Total with the highest `end_sequence`."""

LEDGER_STATEMENTS = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE epochs (
  epoch INTEGER PRIMARY KEY, parent TEXT, follows TEXT, chain TEXT NOT NULL, opened_at_s REAL NOT NULL)""",
    """CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL UNIQUE, task_id TEXT NOT NULL, state TEXT NOT NULL,
  opened_at_s REAL NOT NULL, seal_order INTEGER UNIQUE, ended_at_s REAL, closed INTEGER NOT NULL,
  max_evictions INTEGER NOT NULL, rule TEXT, min_members INTEGER, advantage TEXT, complete_before INTEGER)
  WITHOUT ROWID""",
    "CREATE INDEX groups_by_closed ON groups (closed)",
    """CREATE TABLE rollouts (
  rollout_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, member INTEGER NOT NULL, state TEXT NOT NULL,
  attempt INTEGER NOT NULL, failures INTEGER NOT NULL, reward REAL, advantage REAL,
  batch_id TEXT REFERENCES batches DEFERRABLE INITIALLY DEFERRED, reason TEXT, first_reward REAL, baseline REAL,
  scale REAL, late INTEGER NOT NULL, evictions INTEGER NOT NULL, first_values TEXT, turn_advantages TEXT,
  UNIQUE (group_id, member)) WITHOUT ROWID""",
    "CREATE INDEX rollouts_by_batch ON rollouts (batch_id)",
    """CREATE TABLE attempts (
  rollout_id TEXT NOT NULL REFERENCES rollouts, attempt INTEGER NOT NULL, version TEXT NOT NULL,
  issued_at_s REAL NOT NULL, ended_at_s REAL, offered INTEGER NOT NULL, cause TEXT, reward REAL,
  solved INTEGER NOT NULL, trainable INTEGER NOT NULL, detail TEXT NOT NULL, trained TEXT NOT NULL,
  turns INTEGER NOT NULL, phases_s TEXT NOT NULL, breakdown TEXT, trace_id TEXT NOT NULL, host TEXT NOT NULL,
  charged_to TEXT, scores TEXT, trajectory_file INTEGER, end_sequence INTEGER,
  timeline TEXT, PRIMARY KEY (rollout_id, attempt))
  WITHOUT ROWID""",
    """CREATE TABLE batches (
  batch_id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL UNIQUE, state TEXT NOT NULL,
  epoch INTEGER NOT NULL REFERENCES epochs, version TEXT NOT NULL, members TEXT NOT NULL,
  leased_at_s REAL NOT NULL, queue_order INTEGER, closed INTEGER NOT NULL, tries INTEGER NOT NULL,
  failure TEXT NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX batches_by_closed ON batches (closed)",
    """CREATE TABLE commits (
  sequence INTEGER PRIMARY KEY, batch_id TEXT NOT NULL REFERENCES batches, epoch INTEGER NOT NULL REFERENCES epochs,
  trained_at TEXT NOT NULL, version TEXT NOT NULL, skipped INTEGER NOT NULL, chain TEXT NOT NULL,
  max_staleness INTEGER NOT NULL, committed_at_s REAL NOT NULL, metrics TEXT NOT NULL, rolled_back_by INTEGER)""",
    "CREATE INDEX commits_by_batch ON commits (batch_id)",
    "CREATE INDEX commits_by_chain ON commits (chain)",
    """CREATE TABLE checkpoints (
  version TEXT PRIMARY KEY, path TEXT NOT NULL, batch_ids TEXT NOT NULL, chain TEXT NOT NULL,
  recorded_at_s REAL NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE evaluations (
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, task_id TEXT NOT NULL, tag TEXT NOT NULL, version TEXT NOT NULL,
  cause TEXT NOT NULL, reward REAL, solved INTEGER NOT NULL, detail TEXT NOT NULL, sampled TEXT NOT NULL,
  recorded_at_s REAL NOT NULL, host TEXT NOT NULL, trace_id TEXT NOT NULL, breakdown TEXT, end_sequence INTEGER,
  timeline TEXT, PRIMARY KEY (rollout_id, attempt)) WITHOUT ROWID""",
    "CREATE INDEX evaluations_by_tag ON evaluations (tag)",
    """CREATE TABLE ended_evaluations (
  tag TEXT PRIMARY KEY, step INTEGER NOT NULL, summary TEXT NOT NULL, recorded_at_s REAL NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE tasks (
  task_id TEXT PRIMARY KEY, last_pass INTEGER NOT NULL, groups INTEGER NOT NULL, finished INTEGER NOT NULL,
  solved INTEGER NOT NULL, duration_s REAL NOT NULL, infra INTEGER NOT NULL, poison INTEGER NOT NULL,
  evicted INTEGER NOT NULL, cancelled INTEGER NOT NULL, complete_members INTEGER NOT NULL, reward_sum REAL NOT NULL,
  reward_square_sum REAL NOT NULL, grpo_square_sum REAL NOT NULL, grpo_deviation_sum REAL NOT NULL,
  poison_streak INTEGER NOT NULL, parked INTEGER NOT NULL, parked_at_s REAL,
  last_failure TEXT NOT NULL, failed_on TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE outages (
  number INTEGER PRIMARY KEY, component TEXT NOT NULL, reason TEXT NOT NULL, began_at_s REAL NOT NULL,
  ended_at_s REAL)""",
    """CREATE TABLE interventions (
  sequence INTEGER PRIMARY KEY, action TEXT NOT NULL, subject TEXT NOT NULL, attempt INTEGER, detail TEXT NOT NULL,
  at_s REAL NOT NULL)""",
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE trajectory_files (number INTEGER PRIMARY KEY, last_sequence INTEGER NOT NULL)",
    "CREATE INDEX attempts_by_end ON attempts (end_sequence) WHERE end_sequence NOTNULL",
    "CREATE INDEX evaluations_by_end ON evaluations (end_sequence) WHERE end_sequence NOTNULL",
    f"INSERT INTO totals (name, value) VALUES ('{NEWEST_END}', 0)",
    *(
        f"""CREATE TRIGGER {trigger} ON {table} WHEN NEW.{at_s} NOTNULL AND NEW.end_sequence IS NULL BEGIN
  UPDATE totals SET value = max(value + 1, CAST(NEW.{at_s} * 1e6 AS INTEGER)) WHERE name = '{NEWEST_END}';
  UPDATE {table} SET end_sequence = (SELECT value FROM totals WHERE name = '{NEWEST_END}')
    WHERE rollout_id = NEW.rollout_id AND attempt = NEW.attempt;
END"""
        for trigger, table, at_s in (
            ("attempt_ends AFTER UPDATE OF ended_at_s", "attempts", "ended_at_s"),
            ("attempt_is_over AFTER INSERT", "attempts", "ended_at_s"),
            ("evaluation_ends AFTER INSERT", "evaluations", "recorded_at_s"),
        )
    ),
)

TRAJECTORIES_DDL = """
CREATE TABLE IF NOT EXISTS trajectories (
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (rollout_id, attempt));
"""


@dataclass(frozen=True, slots=True)
class RecordTable:
    """Table for one kind of record, with the key columns first. `read` (by name) and `conversions` (by position) are
    for columns that are not plain values."""

    name: str
    record: Callable[..., Record]
    key: tuple[str, ...]
    columns: tuple[str, ...]
    read: Mapping[str, Callable[[Any], object]]
    conversions: tuple[tuple[int, Callable[[Any], object]], ...]

    def upsert(self) -> str:
        """Return the SQL that inserts a row or replaces its columns."""
        places = ", ".join("?" * len(self.columns))
        rest = [column for column in self.columns if column not in self.key]
        updates = ", ".join(f"{column} = excluded.{column}" for column in rest)
        return (
            f"INSERT INTO {self.name} ({', '.join(self.columns)}) VALUES ({places}) "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {updates}"
        )

    def select(self, where: str = "") -> str:
        """Return the SQL that reads the columns, in order."""
        return f"SELECT {', '.join(self.columns)} FROM {self.name} {where}"

    def row(self, record: Record) -> list[object]:
        """Return the values of a record in the order of the columns."""
        values = [getattr(record, column) for column in self.columns]
        for place, convert in self.conversions:
            values[place] = convert(values[place])
        return values

    def load(self, row: Iterable[object]) -> Record:
        """Return the record for a row returned by `select`."""
        pairs = zip(self.columns, row, strict=True)
        return self.record(
            **{column: self.read[column](value) if column in self.read else value for column, value in pairs}
        )


def _table(
    record: Callable[..., Record],
    name: str,
    key: str,
    rest: str,
    read: Mapping[str, Callable[[Any], object]],
    write: Mapping[str, Callable[[Any], object]],
) -> RecordTable:
    keys = tuple(key.split())
    columns = (*keys, *rest.split())
    conversions = tuple((columns.index(column), convert) for column, convert in write.items())
    return RecordTable(name=name, record=record, key=keys, columns=columns, read=read, conversions=conversions)


@lru_cache(maxsize=4096)
def _version(text: str | None) -> PolicyVersion | None:
    return None if text is None else PolicyVersion.parse(text)


def _version_text(version: PolicyVersion | None) -> str | None:
    return None if version is None else str(version)


_json = json.JSONEncoder(separators=(",", ":")).encode


# Cached, because neighbouring rows repeat few different texts.
@lru_cache(maxsize=4096)
def read_trained(text: str) -> tuple[VersionTokens, ...]:
    """Parse `[["1.3",120],...]`: the number of tokens that each version sampled."""
    return tuple(
        VersionTokens(version=PolicyVersion.parse(version), tokens=tokens) for version, tokens in json.loads(text)
    )


def _write_trained(parts: tuple[VersionTokens, ...]) -> str:
    return _json([[str(part.version), part.tokens] for part in parts])


def read_members(text: str) -> tuple[BatchMember, ...]:
    """Parse `[["g000000-0",1,2],...]`: the rollout, attempt and staleness of each member of a batch, in order."""
    return tuple(
        BatchMember(rollout_id=rollout_id, attempt=attempt, staleness=staleness)
        for rollout_id, attempt, staleness in json.loads(text)
    )


def _write_members(members: tuple[BatchMember, ...]) -> str:
    return _json([[member.rollout_id, member.attempt, member.staleness] for member in members])


def _pairs(text: str) -> tuple[tuple[str, float], ...]:
    return tuple((name, value) for name, value in json.loads(text))


def _read_hosts(text: str) -> tuple[HostFailures, ...]:
    return tuple(HostFailures(*item) for item in json.loads(text))


def _write_hosts(failures: tuple[HostFailures, ...]) -> str:
    return _json([[item.host, item.first_at_s, item.last_at_s] for item in failures])


def _read_turns(text: str | None) -> dict[int, float] | None:
    return None if text is None else dict(json.loads(text))


def _write_turns(turns: Mapping[int, float] | None) -> str | None:
    return None if turns is None else _json(list(turns.items()))


def _write_scores(scores: StepScores | None) -> str | None:
    return None if scores is None else scores.to_json()


def _write_breakdown(breakdown: Breakdown | None) -> str | None:
    return None if breakdown is None else breakdown.to_json()


def _names(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


def _optional(kind: Callable[[str], object]) -> Callable[[str | None], object]:
    return lambda text: None if text is None else kind(text)


TABLES: Mapping[type, RecordTable] = {
    EpochRecord: _table(
        EpochRecord,
        "epochs",
        "epoch",
        "parent chain opened_at_s follows",
        {"parent": _version, "follows": _version},
        {"parent": _version_text, "follows": _version_text},
    ),
    GroupRecord: _table(
        GroupRecord,
        "groups",
        "group_id",
        "ordinal task_id state opened_at_s seal_order ended_at_s closed max_evictions rule min_members advantage "
        "complete_before",
        {"state": GroupState, "closed": bool},
        {},
    ),
    RolloutRecord: _table(
        RolloutRecord,
        "rollouts",
        "rollout_id",
        "group_id member state attempt failures reward advantage batch_id reason first_reward baseline scale late "
        "evictions first_values turn_advantages",
        {
            "state": RolloutState,
            "reason": _optional(FilterReason),
            "late": bool,
            "first_values": _read_turns,
            "turn_advantages": _read_turns,
        },
        {"first_values": _write_turns, "turn_advantages": _write_turns},
    ),
    AttemptRecord: _table(
        AttemptRecord,
        "attempts",
        "rollout_id attempt",
        "version issued_at_s ended_at_s offered cause reward trainable detail trained turns phases_s trace_id solved "
        "host charged_to scores breakdown timeline",
        {
            "version": _version,
            "offered": bool,
            "solved": bool,
            "trainable": bool,
            "cause": _optional(Cause),
            "charged_to": _optional(Charge),
            "trained": read_trained,
            "phases_s": _pairs,
            "scores": _optional(StepScores.from_json),
            "breakdown": _optional(Breakdown.from_json),
        },
        {
            "version": str,
            "trained": _write_trained,
            "phases_s": _json,
            "scores": _write_scores,
            "breakdown": _write_breakdown,
        },
    ),
    BatchRecord: _table(
        BatchRecord,
        "batches",
        "batch_id",
        "ordinal state epoch version members leased_at_s queue_order closed tries failure",
        {"state": BatchState, "version": _version, "members": read_members, "closed": bool},
        {"version": str, "members": _write_members},
    ),
    CommitRecord: _table(
        CommitRecord,
        "commits",
        "sequence",
        "batch_id epoch trained_at version skipped chain max_staleness committed_at_s metrics rolled_back_by",
        {"trained_at": _version, "version": _version, "skipped": bool, "metrics": json.loads},
        {"trained_at": str, "version": str, "metrics": _json},
    ),
    CheckpointRecord: _table(
        CheckpointRecord,
        "checkpoints",
        "version",
        "path batch_ids chain recorded_at_s",
        {"version": _version, "batch_ids": _names},
        {"version": str, "batch_ids": _json},
    ),
    EvaluationRecord: _table(
        EvaluationRecord,
        "evaluations",
        "rollout_id attempt",
        "task_id tag version cause reward detail sampled recorded_at_s solved host trace_id breakdown timeline",
        {
            "version": _version,
            "cause": Cause,
            "sampled": read_trained,
            "solved": bool,
            "breakdown": _optional(Breakdown.from_json),
        },
        {"version": str, "sampled": _write_trained, "breakdown": _write_breakdown},
    ),
    TaskRecord: _table(
        TaskRecord,
        "tasks",
        "task_id",
        "last_pass groups finished solved duration_s infra poison evicted cancelled complete_members reward_sum "
        "reward_square_sum grpo_square_sum grpo_deviation_sum poison_streak parked last_failure "
        "failed_on parked_at_s",
        {"parked": bool, "failed_on": _read_hosts},
        {"failed_on": _write_hosts},
    ),
    OutageRecord: _table(
        OutageRecord, "outages", "number", "component reason began_at_s ended_at_s", {"component": Component}, {}
    ),
    CounterRecord: _table(CounterRecord, "counters", "name", "value", {}, {}),
    InterventionRecord: _table(
        InterventionRecord,
        "interventions",
        "sequence",
        "action subject attempt detail at_s",
        {"action": OperatorAction},
        {},
    ),
}
"""Tables in the order in which rows are written, so that references exist."""
