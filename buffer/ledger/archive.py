"""The archive `archive.db` beside the ledger: rows of closed groups and of the steps that a checkpoint covers.

Invariants:
- `ledger.db` holds the open rows, and totals of the rest: folding, copying and rolling back a run reads no history.
- A row is copied to the archive before it leaves the ledger, and stays in the archive when it is copied back: at every
  moment it is in at least one of them. A row of the ledger overrides the archive's row of the same key.
- Rows of the archive whose number the ledger has not assigned yet do not count: a ledger that was restored from a
  checkpoint's copy may be older than the archive beside it.
- Steps leave the ledger in order: it holds all steps from the oldest one that a rollout in it was trained in.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from headrace.buffer.core.records import EvaluationRecord, RolloutState
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.schema import LEDGER_STATEMENTS, SCHEMA_VERSION, STAMP, TABLES
from headrace.buffer.primitives.database import connect, transaction, write_stamp
from headrace.buffer.primitives.durable_files import fsync
from headrace.buffer.trajectories.types import RolloutId

ARCHIVE: Final = "archive.db"
GROUPS_AT_ONCE: Final = 64
"""Number of groups moved in one transaction, which then takes only a few milliseconds, so that other writes can run
in between."""
STATE: Final = "rollouts_"
STEPS, SKIPPED, EVALUATIONS = "steps", "steps_skipped", "evaluations"
"""Names of the totals other than the rollouts by state and the next numbers."""
_NEXT: Final = {
    "next_ordinal": ("groups", "ordinal", 0),
    "next_seal": ("groups", "seal_order", 1),
    "next_batch": ("batches", "ordinal", 1),
    "next_commit": ("commits", "sequence", 1),
}
"""Table, column and first value of each number that is assigned in order."""
_TRAINED: Final = "SELECT batch_id FROM commits WHERE sequence > ? AND rolled_back_by IS NULL"
_UNDONE: Final = f"SELECT batch_id, members FROM batches WHERE batch_id IN ({_TRAINED})"
_GROUPS_OF: Final = "SELECT DISTINCT group_id FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))"
_FIRST_OPEN_STEP: Final = """
SELECT min(sequence) FROM (
  SELECT min(commits.sequence) AS sequence FROM batches JOIN commits USING (batch_id) WHERE batches.closed = 0
  UNION ALL SELECT min(commits.sequence) FROM groups JOIN rollouts USING (group_id)
    JOIN commits USING (batch_id) WHERE groups.closed = 0
  UNION ALL SELECT max(commits.sequence) FROM batches JOIN commits USING (batch_id)
    WHERE batches.closed = 1 AND rolled_back_by IS NULL)
"""
"""First step that must stay in the ledger: the oldest one on an open batch, or on a batch with a rollout of an open
group; if there is none, the newest step."""
_REMEMBER_FILES: Final = """
INSERT INTO trajectory_files (number, last_sequence)
SELECT trajectory_file, max(coalesce(commits.sequence, 0)) FROM rollouts JOIN attempts USING (rollout_id)
LEFT JOIN commits ON commits.batch_id = rollouts.batch_id AND commits.rolled_back_by IS NULL
  AND attempts.attempt = rollouts.attempt
WHERE trajectory_file IS NOT NULL AND {where} GROUP BY trajectory_file
ON CONFLICT (number) DO UPDATE SET last_sequence = max(last_sequence, excluded.last_sequence)
"""
_THESE: Final = "group_id IN (SELECT value FROM json_each(?))"
_OF_THESE: Final = f"rollout_id IN (SELECT rollout_id FROM rollouts WHERE {_THESE})"


class Archive:
    """Archive of one open ledger, whose connection it uses. If `path` is None, the archive is kept in memory. The file
    is created when the first rows are archived."""

    def __init__(self, ledger: sqlite3.Connection, path: Path | None) -> None:
        """Raise LedgerRefused when the archive belongs to another run, or is not readable."""
        self._ledger, self._path = ledger, path
        self._database: sqlite3.Connection | None = None
        if path is not None and path.exists():
            self._open()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def lacks(self, chain: str) -> bool:
        """Return whether a return to the step with this hash chain undoes rows that are no longer in any file, because
        the archive was lost or replaced with a new one."""
        sequence = self.sequence_of(chain)
        if sequence is None:
            return self._database is None and totals_of(self._ledger).get(STEPS, 0) > 0
        later = {number for (number,) in self._both("SELECT sequence FROM commits WHERE sequence > ?", sequence)}
        undone = self._undone(sequence)
        trained = self._ledger.execute(_TRAINED, (sequence,))
        members = json.dumps(_members(undone))
        rollouts = "SELECT rollout_id FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))"
        return (
            len(later) < next_numbers(self._ledger)["next_commit"] - 1 - sequence
            or any(batch_id not in undone for (batch_id,) in trained)
            or len(set(self._both(rollouts, members))) < len(set(_members(undone)))
        )

    def move_groups(self) -> bool:
        """Move some closed groups with all their rows. Return False when there were none left to move."""
        found = self._ledger.execute("SELECT group_id FROM groups WHERE closed = 1 LIMIT ?", (GROUPS_AT_ONCE,))
        ids = json.dumps([group_id for (group_id,) in found])
        if ids == "[]":
            return False
        self._copy({"groups": _THESE, "rollouts": _THESE, "attempts": _OF_THESE}, ids)
        states = self._ledger.execute(f"SELECT state, count(*) FROM rollouts WHERE {_THESE} GROUP BY state", (ids,))
        with transaction(self._ledger):
            self._add({STATE + state: count for state, count in states.fetchall()})
            self._ledger.execute(_REMEMBER_FILES.format(where=_THESE), (ids,))
            self._ledger.execute(f"DELETE FROM attempts WHERE {_OF_THESE}", (ids,))
            self._ledger.execute(f"DELETE FROM rollouts WHERE {_THESE}", (ids,))
            self._ledger.execute(f"DELETE FROM groups WHERE {_THESE}", (ids,))
        return True

    def move_steps(self) -> tuple[int, list[str]]:
        """Move the steps before the first one that must stay, with their batches and checkpoints. Return the step that
        stays, and the versions of the moved checkpoints."""
        first: int = self._ledger.execute(_FIRST_OPEN_STEP).fetchone()[0] or 0
        before = "sequence < ?"
        (steps,) = self._ledger.execute(f"SELECT count(*) FROM commits WHERE {before}", (first,)).fetchone()
        loose = (
            "closed = 1 AND batch_id NOT IN (SELECT batch_id FROM rollouts WHERE batch_id IS NOT NULL) "
            "AND batch_id NOT IN (SELECT batch_id FROM commits WHERE sequence >= ?)"
        )
        if not steps:
            return first, []
        # A checkpoint of the start policy belongs to no step, and stays.
        old = (
            "chain IN (SELECT chain FROM commits WHERE sequence < ?1) "
            "AND chain NOT IN (SELECT chain FROM commits WHERE sequence >= ?1)"
        )
        versions = [
            version for (version,) in self._ledger.execute(f"SELECT version FROM checkpoints WHERE {old}", (first,))
        ]
        self._copy({"commits": before, "batches": loose, "checkpoints": old}, first)
        with transaction(self._ledger):
            self._count_steps(before, first, 1)
            self._ledger.execute(f"DELETE FROM checkpoints WHERE {old}", (first,))
            self._ledger.execute(f"DELETE FROM commits WHERE {before}", (first,))
            self._ledger.execute(f"DELETE FROM batches WHERE {loose}", (first,))
        return first, versions

    def move_evaluations(self) -> list[tuple[RolloutId, int]]:
        """Move the results of evaluations that have ended; return their rollouts and attempts."""
        ended = "tag IN (SELECT tag FROM ended_evaluations)"
        keys = self._ledger.execute(f"SELECT rollout_id, attempt FROM evaluations WHERE {ended}").fetchall()
        if keys:
            self._copy({"evaluations": ended, "ended_evaluations": "true"})
            with transaction(self._ledger):
                self._add({EVALUATIONS: len(keys)})
                self._ledger.execute(f"DELETE FROM evaluations WHERE {ended}")
                self._ledger.execute("DELETE FROM ended_evaluations")
        return keys

    def evaluations(self, tag: str) -> list[tuple[object, ...]]:
        """Return the rows of one evaluation, in the order of the record's columns."""
        return self._both(TABLES[EvaluationRecord].select("WHERE tag = ?"), tag)

    def ended_evaluations(self) -> dict[str, float | None]:
        """Return the success rates of evaluations that have ended, by tag."""
        return dict(self._both("SELECT tag, json_extract(summary, '$.success') FROM ended_evaluations"))

    def sequence_of(self, chain: str) -> int | None:
        """Return the surviving step after which the hash chain had this value; 0 for the empty chain, None when the
        chain is unknown."""
        if not chain:
            return 0
        query = "SELECT sequence FROM commits WHERE chain = ? AND rolled_back_by IS NULL"
        newest = "SELECT chain, rolled_back_by FROM commits WHERE sequence = ?"
        for (sequence,) in self._both(query, chain):
            # A step in the archive may have been undone in the ledger since.
            if self._ledger.execute(newest, (sequence,)).fetchone() in (None, (chain, None)):
                return int(sequence)
        return None

    def recall(self, sequence: int) -> None:
        """Bring back and reopen the rows that a return to step `sequence` undoes: later steps, their batches, and the
        groups of their members."""
        here = json.dumps([number for (number,) in self._ledger.execute("SELECT sequence FROM commits")])
        commits = self._archived(
            "commits", "sequence >= ? AND sequence NOT IN (SELECT value FROM json_each(?))", sequence, here
        )
        undone = self._undone(sequence)
        with transaction(self._ledger):
            self._put_back("batches", "batch_id IN (SELECT batch_id FROM commits WHERE sequence >= ?)", sequence)
            _insert(self._ledger, "commits", *commits)
            self._put_back("checkpoints", "chain IN (SELECT chain FROM commits WHERE sequence >= ?)", sequence)
            self._open_groups_of(_members(undone))
            _open_again(self._ledger, "batches", "batch_id", undone)
            back = json.dumps([row[commits[0].index("sequence")] for row in commits[1]])
            self._count_steps("sequence IN (SELECT value FROM json_each(?))", back, -1)

    def recall_groups_of(self, rollouts: Iterable[str]) -> None:
        """Bring back and reopen the groups of these rollouts."""
        with transaction(self._ledger):
            self._open_groups_of(rollouts)

    def _undone(self, sequence: int) -> dict[str, str]:
        """Return the batches of later surviving steps, with their members as JSON."""
        # The ledger last, because it overrides the archive.
        return dict(self._both(_UNDONE, sequence)[::-1])

    def _open_groups_of(self, rollouts: Iterable[str]) -> None:
        groups = {group_id for (group_id,) in self._both(_GROUPS_OF, json.dumps(sorted(rollouts)))}
        present = {group_id for (group_id,) in self._ledger.execute("SELECT group_id FROM groups")}
        away = json.dumps(sorted(groups - present))
        self._put_back("batches", f"batch_id IN (SELECT batch_id FROM rollouts WHERE {_THESE})", away)
        self._put_back("groups", _THESE, away)
        self._put_back("rollouts", _THESE, away)
        self._put_back("attempts", _OF_THESE, away)
        _open_again(self._ledger, "groups", "group_id", groups)
        states = self._ledger.execute(f"SELECT state, count(*) FROM rollouts WHERE {_THESE} GROUP BY state", (away,))
        self._add({STATE + state: -count for state, count in states.fetchall()})

    def export(self, destination: Path) -> None:
        """Copy the archive, if there is one. Raises sqlite3.Error."""
        if self._database is not None:
            with closing(sqlite3.connect(destination)) as copy:
                self._database.backup(copy)

    def _both(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        databases = (self._ledger, self._database)
        return [row for one in databases if one is not None for row in one.execute(query, values)]

    def checkpoint_step(self, version: str) -> int | None:
        """Return the last step that a recorded checkpoint covers, 0 for a checkpoint of the start policy; None when the
        checkpoint is not on the surviving path."""
        found = self._both("SELECT chain FROM checkpoints WHERE version = ?", version)
        return self.sequence_of(found[0][0]) if found else None

    def _copy(self, wheres: Mapping[str, str], *values: object) -> None:
        """Copy rows of the ledger to the archive, durably."""
        if self._database is None:
            self._open()
        assert self._database is not None
        with transaction(self._database):
            for table, where in wheres.items():
                _insert(self._database, table, *_select(self._ledger, table, where, values))

    def _archived(self, table: str, where: str, *values: object) -> tuple[list[str], list[tuple[object, ...]]]:
        return ([], []) if self._database is None else _select(self._database, table, where, values)

    def _put_back(self, table: str, where: str, *values: object) -> None:
        """Copy rows back to the ledger, except those that it still has."""
        _insert(self._ledger, table, *self._archived(table, where, *values), verb="INSERT OR IGNORE")

    def _count_steps(self, where: str, value: object, sign: int) -> None:
        query = f"SELECT count(*), coalesce(sum(skipped), 0) FROM commits WHERE {where} AND rolled_back_by IS NULL"
        steps, skipped = self._ledger.execute(query, (value,)).fetchone()
        self._add({STEPS: sign * steps, SKIPPED: sign * skipped})

    def _add(self, counts: Mapping[str, int]) -> None:
        """Add to the totals of the archive, and record the next numbers, because the rows from which they are derived
        may be moved."""
        insert = "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = "
        self._ledger.executemany(f"{insert} value + excluded.value", counts.items())
        self._ledger.executemany(f"{insert} excluded.value", next_numbers(self._ledger).items())

    def _open(self) -> None:
        """Raise LedgerRefused."""
        database = None
        try:
            database = connect(self._path, foreign_keys=False)
            _prepare(database, dict(self._ledger.execute("SELECT key, value FROM meta")))
            _drop_future_rows(database, next_numbers(self._ledger))
        except (sqlite3.DatabaseError, ValueError) as error:
            if database is not None:
                database.close()
            raise unusable(self._path, error) from error
        self._database = database
        if self._path is not None:
            fsync(self._path.parent)


def unusable(path: Path | None, error: Exception) -> LedgerRefused:
    """Return the error for an archive that cannot be used with the ledger beside it."""
    return LedgerRefused(
        f"{path} is not the archive of the ledger beside it: {error}; put back the archive that belongs to the ledger, "
        "or move this file away: the run then continues without its history"
    )


def totals_of(ledger: sqlite3.Connection) -> dict[str, int]:
    """Return the totals of the archive by name."""
    return dict(ledger.execute("SELECT name, value FROM totals"))


def closed_rollouts(totals: Mapping[str, int]) -> dict[RolloutState, int]:
    """Return the number of archived rollouts by state."""
    return {state: totals[STATE + state] for state in RolloutState if totals.get(STATE + state)}


def next_numbers(ledger: sqlite3.Connection) -> dict[str, int]:
    """Return the next numbers to be assigned, by name, whether or not earlier rows are still in the ledger."""
    known = totals_of(ledger)
    numbers = {}
    for name, (table, column, first) in _NEXT.items():
        (highest,) = ledger.execute(f"SELECT max({column}) FROM {table}").fetchone()
        numbers[name] = max(known.get(name, first), first if highest is None else highest + 1)
    return numbers


def _prepare(database: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """Create the tables, or check that they exist and belong to this run. Raises ValueError, sqlite3.DatabaseError."""
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        with transaction(database):
            for statement in LEDGER_STATEMENTS:
                database.execute(statement)
            database.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta.items())
            write_stamp(database, STAMP)
        return
    (schema,) = database.execute("PRAGMA user_version").fetchone()
    if schema != SCHEMA_VERSION:
        raise ValueError(f"it has schema {schema}, but the ledger has schema {SCHEMA_VERSION}")
    if (found := dict(database.execute("SELECT key, value FROM meta"))) != dict(meta):
        raise ValueError(f"it was made for {found}, but the ledger for {dict(meta)}")


def _drop_future_rows(archive: sqlite3.Connection, numbers: Mapping[str, int]) -> None:
    """Delete the rows that a ledger restored from a copy will create again."""
    later = "SELECT group_id FROM groups WHERE ordinal >= ?"
    ordinal, batch, step = (numbers[name] for name in ("next_ordinal", "next_batch", "next_commit"))
    with transaction(archive):
        archive.execute(
            f"DELETE FROM attempts WHERE rollout_id IN (SELECT rollout_id FROM rollouts WHERE group_id IN ({later}))",
            (ordinal,),
        )
        archive.execute(f"DELETE FROM rollouts WHERE group_id IN ({later})", (ordinal,))
        archive.execute("DELETE FROM groups WHERE ordinal >= ?", (ordinal,))
        archive.execute("DELETE FROM batches WHERE ordinal >= ?", (batch,))
        archive.execute("DELETE FROM commits WHERE sequence >= ?", (step,))


def _select(
    database: sqlite3.Connection, table: str, where: str, values: Sequence[object]
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Return the column names and the rows."""
    cursor = database.execute(f"SELECT * FROM {table} WHERE {where}", values)
    return [column[0] for column in cursor.description], cursor.fetchall()


def _insert(
    database: sqlite3.Connection,
    table: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    verb: str = "INSERT OR REPLACE",
) -> None:
    if columns:
        places = ", ".join("?" * len(columns))
        database.executemany(f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({places})", rows)


def _members(batches: Mapping[str, str]) -> list[str]:
    """Return the rollouts of `batches`, which maps batch ids to members as JSON."""
    return [rollout_id for text in batches.values() for rollout_id, *_ in json.loads(text)]


def _open_again(ledger: sqlite3.Connection, table: str, key: str, ids: Iterable[str]) -> None:
    query = f"UPDATE {table} SET closed = 0 WHERE {key} IN (SELECT value FROM json_each(?))"
    ledger.execute(query, (json.dumps(sorted(ids)),))
