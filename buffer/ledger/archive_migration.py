"""The split of a single-file ledger of older versions into a small ledger and an archive.

Invariants:
- The old file itself becomes the archive; the open rows are copied out of it. The time does not depend on the number of
  closed rows, except for counting them once.
- At every moment `ledger.db` is a complete ledger: the old one until the new one replaces it. The files of an
  interrupted attempt are removed by the next one.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import orjson

from headrace.buffer.ledger.archive import ARCHIVE, EVALUATIONS, FIRST_OPEN_STEP, SKIPPED, STATE, STEPS, next_numbers
from headrace.buffer.ledger.schema import APPLICATION_ID, LEDGER_STATEMENTS, SCHEMA_VERSION
from headrace.buffer.primitives.database import connect, transaction
from headrace.buffer.primitives.durable_files import fsync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPEN = "group_id IN (SELECT group_id FROM old.groups WHERE closed = 0)"
_STAYS = {
    "batches": (
        "closed = 0 OR batch_id IN (SELECT batch_id FROM old.commits WHERE sequence >= :first) "
        f"OR batch_id IN (SELECT batch_id FROM old.rollouts WHERE {_OPEN})"
    ),
    "commits": "sequence >= :first",
    "groups": "closed = 0",
    "rollouts": _OPEN,
    "attempts": f"rollout_id IN (SELECT rollout_id FROM old.rollouts WHERE {_OPEN})",
    "checkpoints": "chain = '' OR chain IN (SELECT chain FROM old.commits WHERE sequence >= :first)",
    "evaluations": "tag NOT IN (SELECT tag FROM main.ended_evaluations)",
    "totals": "false",
    "ended_evaluations": "false",
    "trajectory_files": "false",
}
"""Condition on the rows that are copied into the new ledger, by table; all rows of other tables are copied."""


def is_whole(ledger: sqlite3.Connection) -> bool:
    """Whether the ledger still has all rows itself, as a just migrated one does."""
    (totals,) = ledger.execute("SELECT count(*) FROM totals").fetchone()
    return not totals


def split(path: Path) -> None:
    """Split the single-file ledger at `path`, which must not be open, into a small ledger and an archive. Raises
    sqlite3.Error, OSError."""
    small, archive = path.with_name(path.name + ".small"), path.with_name(ARCHIVE)
    for suffix in ("", "-wal", "-shm", "-journal"):
        small.with_name(small.name + suffix).unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        # No log may remain beside a file that is renamed.
        old.execute("PRAGMA journal_mode = DELETE")
    with closing(connect(small, foreign_keys=False)) as ledger:
        ledger.execute("PRAGMA journal_mode = DELETE")
        ledger.execute("ATTACH ? AS old", (str(path),))
        (first,) = ledger.execute(FIRST_OPEN_STEP.format(of="old.")).fetchone()
        with transaction(ledger):
            for statement in LEDGER_STATEMENTS:
                ledger.execute(statement)
            evaluations = _ended_evaluations(path.with_name("metrics.jsonl"))
            ended = [(tag, step, text.decode(), time_s) for tag, step, text, time_s in evaluations]
            ledger.executemany("INSERT OR REPLACE INTO ended_evaluations VALUES (?, ?, ?, ?)", ended)
            tables = ledger.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")
            for (table,) in tables.fetchall():
                where = _STAYS.get(table, "true")
                columns = ", ".join(row[1] for row in ledger.execute(f"PRAGMA main.table_info({table})"))
                ledger.execute(
                    f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM old.{table} WHERE {where}",
                    {"first": first or 0} if ":first" in where else {},
                )
            _count_closed_rows(ledger, first or 0)
            ledger.execute(f"PRAGMA main.application_id = {APPLICATION_ID}")
            ledger.execute(f"PRAGMA main.user_version = {SCHEMA_VERSION}")
    fsync(small)
    archive.unlink(missing_ok=True)
    os.link(path, archive)
    small.replace(path)
    fsync(path.parent)


def _count_closed_rows(ledger: sqlite3.Connection, first: int) -> None:
    states = ledger.execute(
        "SELECT rollouts.state, count(*) FROM old.rollouts JOIN old.groups USING (group_id) WHERE closed = 1 "
        "GROUP BY rollouts.state"
    )
    totals = {STATE + state: count for state, count in states.fetchall()}
    totals[STEPS], totals[SKIPPED] = ledger.execute(
        "SELECT count(*), coalesce(sum(skipped), 0) FROM old.commits WHERE sequence < ? AND rolled_back_by IS NULL",
        (first,),
    ).fetchone()
    (totals[EVALUATIONS],) = ledger.execute(
        "SELECT (SELECT count(*) FROM old.evaluations) - (SELECT count(*) FROM main.evaluations)"
    ).fetchone()
    ledger.execute(
        "INSERT INTO trajectory_files (number, last_sequence) "
        "SELECT trajectory_file, max(coalesce(commits.sequence, 0)) FROM old.attempts "
        "JOIN old.rollouts USING (rollout_id) JOIN old.groups USING (group_id) LEFT JOIN old.commits ON "
        "commits.batch_id = rollouts.batch_id AND rolled_back_by IS NULL AND attempts.attempt = rollouts.attempt "
        "WHERE trajectory_file IS NOT NULL AND closed = 1 GROUP BY trajectory_file"
    )
    ledger.executemany(
        "INSERT INTO totals (name, value) VALUES (?, ?)", (totals | next_numbers(ledger, of="old.")).items()
    )


def _ended_evaluations(metrics: Path) -> Iterator[tuple[str, int, bytes, float]]:
    """Yield tag, step, summary and time of the ended evaluations, which older versions stored in the metrics only.
    Invalid lines are ignored."""
    if not metrics.is_file():
        return
    with metrics.open("rb") as file:
        for line in file:
            if b'"evaluation"' not in line:
                continue
            try:
                record = orjson.loads(line)
                if record["kind"] == "evaluation":
                    yield str(record["tag"]), int(record["step"]), orjson.dumps(record), float(record["time_s"])
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                continue
