"""The migration of ledgers from older schemas to the newest one.

Invariants:
- All steps of a migration are in one transaction: a ledger has the old schema or the new one, never a mixture.
- Existing values do not change; new columns get the values that the old version implied. Only the kinds of advantages
  get the names that they have had since schema 4.
- A single-file ledger (schema 1 or 2) itself becomes the archive; the open rows are copied out of it. Apart from
  counting the closed rows and renaming their kinds once, the time does not depend on their number.
- The archive of a ledger of schema 3 to 5 is migrated before the ledger, each in one transaction. After an interruption
  the next start continues.
- At every moment `ledger.db` is a complete ledger: the old one until the new one replaces it. The files of an
  interrupted attempt are removed by the next one.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import orjson

from headrace.buffer.core.advantages import SCALE_EPSILON, deviation_square_sum, zero_variance
from headrace.buffer.ledger.archive import (
    ARCHIVE,
    EVALUATIONS,
    FIRST_OPEN_STEP,
    SKIPPED,
    STATE,
    STEPS,
    next_numbers,
    unusable,
)
from headrace.buffer.ledger.schema import (
    APPLICATION_ID,
    CHANGES_OF_3,
    CHANGES_OF_4,
    CHANGES_OF_5,
    CHANGES_OF_6,
    LEDGER_STATEMENTS,
    SCHEMA_VERSION,
    TABLES_OF_2,
)
from headrace.buffer.primitives.database import connect, transaction
from headrace.buffer.primitives.durable_files import fsync

_COLUMNS_OF_2 = (
    ("groups", "max_evictions INTEGER NOT NULL DEFAULT 0"),
    ("groups", "rule TEXT"),
    ("groups", "min_members INTEGER"),
    ("groups", "advantage TEXT"),
    ("groups", "complete_before INTEGER"),
    ("rollouts", "first_reward REAL"),
    ("rollouts", "baseline REAL"),
    ("rollouts", "scale REAL"),
    ("rollouts", "late INTEGER NOT NULL DEFAULT 0"),
    ("rollouts", "evictions INTEGER NOT NULL DEFAULT 0"),
)


def migrate(database: sqlite3.Connection, schema: int) -> None:
    """Migrate a ledger of an older schema to the newest, within the caller's transaction."""
    for version in range(schema, SCHEMA_VERSION):
        _STEPS[version](database)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _from_1(database: sqlite3.Connection) -> None:
    """Migrate from version 1, which had only the rule `all`, evicted rollouts without issuing them again, and had no
    history of tasks."""
    for table, column in _COLUMNS_OF_2:
        database.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    database.execute(TABLES_OF_2)
    database.execute("UPDATE rollouts SET first_reward = reward")
    tasks = database.execute("SELECT task_id, count(*) FROM groups GROUP BY task_id").fetchall()
    for task_id, groups in tasks:
        database.execute(
            "INSERT INTO tasks SELECT ?, ?, ?, count(*), coalesce(sum(attempts.reward > 0), 0), "
            "coalesce(sum(max(0.0, attempts.ended_at_s - attempts.issued_at_s)), 0.0), "
            "0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, '' FROM attempts JOIN rollouts USING (rollout_id) "
            "JOIN groups USING (group_id) WHERE groups.task_id = ? AND attempts.reward IS NOT NULL",
            (task_id, groups - 1, groups, task_id),
        )
    database.execute(
        "UPDATE tasks SET evicted = (SELECT count(*) FROM rollouts JOIN groups USING (group_id) "
        "WHERE groups.task_id = tasks.task_id AND rollouts.state = 'evicted'), "
        "poison = (SELECT count(*) FROM rollouts JOIN groups USING (group_id) "
        "WHERE groups.task_id = tasks.task_id AND rollouts.state = 'poison'), "
        "infra = (SELECT coalesce(sum(failures), 0) FROM rollouts JOIN groups USING (group_id) "
        "WHERE groups.task_id = tasks.task_id)"
    )
    sealed = "SELECT group_id, task_id, seal_order FROM groups WHERE state = 'sealed' ORDER BY seal_order"
    for group_id, task_id, seal_order in database.execute(sealed).fetchall():
        _complete_group_of_1(database, group_id, task_id, seal_order)


def _complete_group_of_1(database: sqlite3.Connection, group_id: str, task_id: str, seal_order: int) -> None:
    """Reconstruct the baselines and scales of a group of version 1 from its advantages, and add the group to its task's
    history."""
    query = "SELECT rollout_id, reward, advantage FROM rollouts WHERE group_id = ? AND reward IS NOT NULL"
    members = database.execute(f"{query} ORDER BY member", (group_id,)).fetchall()
    rewards = [reward for _, reward, _ in members]
    kind, scale = _kind_of_1(rewards, [advantage for *_, advantage in members])
    total = math.fsum(rewards)
    database.executemany(
        "UPDATE rollouts SET baseline = ?, scale = ? WHERE rollout_id = ?",
        [
            (reward if zero_variance(rewards) else (total - reward) / (len(rewards) - 1), scale, rollout_id)
            for rollout_id, reward, _ in members
        ],
    )
    database.execute(
        "UPDATE groups SET rule = 'all', min_members = 2, advantage = ?, complete_before = ? WHERE group_id = ?",
        (kind, seal_order + 1, group_id),
    )
    database.execute(
        "UPDATE tasks SET complete_members = complete_members + ?, reward_sum = reward_sum + ?, "
        "reward_square_sum = reward_square_sum + ?, deviation_square_sum = deviation_square_sum + ? WHERE task_id = ?",
        (len(rewards), total, math.fsum(reward**2 for reward in rewards), deviation_square_sum(rewards), task_id),
    )


def _kind_of_1(rewards: Sequence[float], advantages: Sequence[float | None]) -> tuple[str, float]:
    """Infer the kind of advantages from their size, because version 1 did not record it."""
    total = math.fsum(rewards)
    for reward, advantage in zip(rewards, advantages, strict=True):
        distance = reward - (total - reward) / (len(rewards) - 1)
        if advantage is not None and abs(distance) > SCALE_EPSILON:
            return ("centered", 1.0) if math.isclose(advantage, distance) else ("grpo", _scale_of_1(rewards))
    return "grpo", _scale_of_1(rewards)


def _scale_of_1(rewards: Sequence[float]) -> float:
    """Return the population deviation + 1e-6; 1 for equal rewards."""
    return 1.0 if zero_variance(rewards) else math.sqrt(deviation_square_sum(rewards) / len(rewards)) + SCALE_EPSILON


def _from_2(database: sqlite3.Connection) -> None:
    """Migrate from version 2, which had no journal of operators, no `solved` (a reward above 0 counted as solved) and
    no hosts: every failure was charged to its task."""
    for statement in CHANGES_OF_3:
        database.execute(statement)
    for table in ("attempts", "evaluations"):
        database.execute(f"UPDATE {table} SET solved = 1 WHERE reward > 0")
    database.execute("UPDATE attempts SET charged_to = 'task' WHERE cause IN ('infra', 'evaluator', 'poison')")
    # Version 2 counted every step after a resume as a fork, and stored the staleness of its members accordingly.
    database.execute("UPDATE epochs SET follows = parent")


def _from_3(database: sqlite3.Connection) -> None:
    """Migrate from version 3, whose `grpo` was the formula of the first round. Its runs keep that formula, so no group
    is in the new sums of `grpo`."""
    for statement in CHANGES_OF_4:
        database.execute(statement)
    database.execute("UPDATE groups SET advantage = 'grpo_first_round' WHERE advantage = 'grpo'")
    database.execute("UPDATE groups SET advantage = 'leave_one_out' WHERE advantage = 'centered'")


def _from_4(database: sqlite3.Connection) -> None:
    """Migrate from version 4, which recorded no scores of steps."""
    for statement in CHANGES_OF_5:
        database.execute(statement)


def _from_5(database: sqlite3.Connection) -> None:
    """Migrate from version 5, which recorded phases but no breakdown, and neither host nor trace of an evaluation."""
    for statement in CHANGES_OF_6:
        database.execute(statement)


_STEPS: Mapping[int, Callable[[sqlite3.Connection], None]] = {
    1: _from_1,
    2: _from_2,
    3: _from_3,
    4: _from_4,
    5: _from_5,
}


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
"""Condition that selects the rows to copy into the new ledger, by table; all rows of other tables are copied."""


def migrate_archive(ledger: Path) -> None:
    """Migrate the archive beside a ledger, if it exists and has an older schema; it must not be open. Raises
    LedgerRefused."""
    path = ledger.with_name(ARCHIVE)
    # An interrupted split has left both names on one file; the next split removes the archive's.
    if not path.exists() or path.samefile(ledger):
        return
    try:
        with closing(connect(path, foreign_keys=False)) as archive:
            (schema,) = archive.execute("PRAGMA user_version").fetchone()
            # 0: its creator died before it wrote the tables. Newer ones are refused later.
            if 0 < schema < SCHEMA_VERSION:
                with transaction(archive):
                    migrate(archive, schema)
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from error


def is_whole(ledger: sqlite3.Connection) -> bool:
    """True if the ledger still holds all rows itself, as a ledger that has just been migrated does."""
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
    """Yield the tag, step, summary and time of each ended evaluation; older versions stored these only in the metrics.
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
