"""The migration of ledgers of older schemas to the newest one.

Invariants:
- All steps of a migration are one transaction: a ledger has the old schema or the new one, never a mixture.
- Existing values do not change; new columns get the values that the old version implied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.buffer.core.advantages import SCALE_EPSILON, deviation_square_sum, full_scale, zero_variance
from headrace.buffer.ledger.schema import CHANGES_OF_3, SCHEMA_VERSION, TABLES_OF_2

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping, Sequence

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
    """Migrate from version 1, which had only the rule `all`, evicted at once, and had no history of tasks."""
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
    """Reconstruct baselines and scales of a group of version 1 from its advantages, and its part of the history."""
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
            return ("centered", 1.0) if math.isclose(advantage, distance) else ("grpo", full_scale(rewards))
    return "grpo", full_scale(rewards)


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


_STEPS: Mapping[int, Callable[[sqlite3.Connection], None]] = {1: _from_1, 2: _from_2}
