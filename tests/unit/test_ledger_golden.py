"""Ledgers written by older versions load, verify and can be continued."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.export import export
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import RolloutState
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.ledger import Ledger, bring_up_to_date
from headrace.buffer.ledger.migration import migrate_archive
from headrace.buffer.ledger.schema import SCHEMA_VERSION
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

TESTS = Path(__file__).parents[1]


EARLY = cases.SMALL.model_copy(
    update={"batch_size": 8, "group_size": 4, "rule": "count(3) | deadline(1000)", "max_attempts": 2}
)


@pytest.fixture
def golden(tmp_path):
    """Copies a golden run by its name."""
    return lambda name: shutil.copytree(TESTS / "golden" / name, tmp_path / name)


async def open_run(run_dir, config):
    return await ReplayStore.open(run_dir, config, cases.tasks(), run_id="golden", seed=3)


async def finish_all(store, version):
    orders = await store.issue(1000, version)
    return await store.offer_many([cases.result(order, version) for order in orders])


async def test_a_run_with_schema_1_continues(golden):
    run_dir = golden("ledger_v1")
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.issued, report.trained, report.leased, report.steps_rolled_back) == (24, 12, 4, 1)
    version = PolicyVersion(2, 3)
    async with await open_run(run_dir, cases.SMALL) as store:
        status = store.status()
        assert (status.head, status.evaluations) == (version, 1)
        assert status.rollouts[RolloutState.IN_FLIGHT] == 2
        batch = await store.take(version, 2, timeout_s=0.0)
        assert batch.items[1].reward == 1.0
        assert batch.items[1].trajectory.rows[0].tokens_T.shape == (8,)
        after = PolicyVersion(2, 4)
        await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
        await store.keep_in_flight(())
        await finish_all(store, after)
        assert (await store.take(after, 2, timeout_s=0.0)) is not None
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.steps, report.lost, report.trained_twice) == (4, 0, 0)


@pytest.mark.parametrize("name", ["ledger_v1", "ledger_v2"])
async def test_results_in_older_schemas_count_as_solved_if_the_reward_is_positive(golden, name):
    run_dir = golden(name)
    attempts = read_evidence(run_dir).attempts
    assert {attempt.solved for attempt in attempts} == {True, False}
    assert all(attempt.solved == ((attempt.reward or 0.0) > 0) for attempt in attempts)
    async with await open_run(run_dir, EARLY if name == "ledger_v2" else cases.SMALL) as store:
        (evaluation,) = await store.evaluations.recorded("held out")
    assert (evaluation.reward, evaluation.solved) == (1.0, True)


async def test_a_run_with_schema_2_continues(golden):
    run_dir = golden("ledger_v2")
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.issued, report.trained, report.leased, report.poison) == (48, 24, 8, 1)
    async with await open_run(run_dir, EARLY) as store:
        assert store.status().counters["rollouts_reissued"] == 3
        version = PolicyVersion(2, 3)
        again = await store.issue(3, version)
        assert {order.attempt for order in again} == {2}
        assert {order.group_id for order in again} == {"g000010"}
        await store.offer_many([cases.result(order, version, reward=0.0) for order in again])
    report = verify(run_dir)
    assert report.problems == ()
    assert report.sealed == 8 + 3


@pytest.mark.parametrize("name", ["ledger_v3", "ledger_v4", "ledger_v5", "ledger_v6"])
async def test_a_run_with_an_archive_continues(golden, name):
    """A reward above 0 solves nothing by itself."""
    run_dir = golden(name)
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.issued, report.trained, report.leased, report.poison) == (48, 24, 8, 1)
    verdicts = {(attempt.reward, attempt.solved) for attempt in read_evidence(run_dir).attempts}
    assert {(0.1, False), (1.0, True)} <= verdicts
    with closing(sqlite3.connect(run_dir / "archive.db")) as archive:
        assert archive.execute("SELECT count(*) FROM groups").fetchone() == (4,)
    async with await open_run(run_dir, EARLY) as store:
        version = PolicyVersion(2, 3)
        again = await store.issue(3, version)
        assert {(order.attempt, order.group_id) for order in again} == {(2, "g000010")}
        await store.offer_many([cases.result(order, version, reward=0.0) for order in again])
    report = verify(run_dir)
    assert report.problems == ()
    assert report.sealed == 8 + 3


def test_older_schemas_answer_with_their_phases_and_newer_ones_with_a_breakdown(golden):
    older, newer = (read_evidence(golden(name)) for name in ("ledger_v5", "ledger_v6"))
    assert all(attempt.breakdown is None for attempt in older.attempts)
    assert {attempt.phases_s for attempt in older.attempts if attempt.reward} == {(("boot", 0.5), ("agent", 2.0))}
    spent = {attempt.breakdown.to_json() for attempt in newer.attempts if attempt.breakdown}
    assert len(spent) == 1, "also those in the archive"
    ended = [attempt for attempt in newer.attempts if attempt.reward is not None]
    assert sum(attempt.breakdown is not None for attempt in ended) > 8
    assert {attempt.breakdown.parts_s["tool.bash"] for attempt in ended if attempt.breakdown} == {1.5}


@pytest.mark.parametrize("name", ["ledger_v1", "ledger_v2", "ledger_v3"])
def test_groups_of_older_schemas_keep_the_formula_of_the_first_round(golden, name):
    run_dir = golden(name)
    before = read_evidence(run_dir)
    assert {group.advantage for group in before.groups if group.seal_order} == {"grpo_first_round"}
    Ledger.open(run_dir, {"run_id": "golden"}).close()
    after = read_evidence(run_dir)
    assert (after.groups, after.rollouts, after.damage) == (before.groups, before.rollouts, ())
    kinds = {kind for path in run_dir.glob("*.db") for kind in kinds_in(path)}
    assert kinds == {"grpo_first_round"}, "in the archive, too"


def kinds_in(path):
    """The kinds of advantages in a ledger or an archive."""
    with closing(sqlite3.connect(path)) as database:
        return {kind for (kind,) in database.execute("SELECT advantage FROM groups WHERE advantage IS NOT NULL")}


async def test_groups_sealed_with_another_kind_from_now_on_are_checked_by_it(golden):
    """A run whose configuration was changed by hand: each group says by which formula it was sealed."""
    run_dir = golden("ledger_v3")
    async with await open_run(run_dir, EARLY) as store:
        version = PolicyVersion(2, 3)
        await store.keep_in_flight(())
        for _ in range(3):
            for number, order in enumerate(await store.issue(1000, version)):
                await store.offer_many([cases.result(order, version, reward=number % 3 / 2)])
            batch = await store.take(version, 2, timeout_s=0.0)
            version = PolicyVersion(2, version.step + 1)
            await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
    report = verify(run_dir)
    assert report.problems == ()
    assert {"grpo", "grpo_first_round"} <= {group.advantage for group in read_evidence(run_dir).groups}


def test_an_interrupted_migration_of_ledger_and_archive_is_continued(golden):
    """The archive first: until the ledger follows, readers and the next start accept both."""
    run_dir = golden("ledger_v3")
    before = read_evidence(run_dir)
    migrate_archive(run_dir / "ledger.db")
    assert verify(run_dir).problems == ()
    assert read_evidence(run_dir).groups == before.groups
    assert bring_up_to_date(run_dir) == 3
    assert verify(run_dir).problems == ()
    assert read_evidence(run_dir).groups == before.groups


def test_an_archive_that_cannot_be_migrated_is_named(golden):
    run_dir = golden("ledger_v3")
    (run_dir / "archive.db").write_bytes(b"no database at all, whatever its name says" * 100)
    with pytest.raises(LedgerRefused, match=r"archive\.db is not the archive of the ledger beside it"):
        Ledger.open(run_dir, {"run_id": "golden"})
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (3,), "nothing has changed"


def test_an_export_of_an_old_ledger_contains_its_archive(golden, tmp_path):
    run_dir = golden("ledger_v3")
    before = (run_dir / "archive.db").read_bytes()
    rows = export(run_dir, tmp_path / "out").rows
    assert rows["groups"] == len(read_evidence(run_dir).groups) == 12
    assert (run_dir / "archive.db").read_bytes() == before


def test_a_reader_does_not_change_an_old_ledger(golden):
    run_dir = golden("ledger_v1")
    before = (run_dir / "ledger.db").read_bytes()
    evidence = read_evidence(run_dir)
    assert (run_dir / "ledger.db").read_bytes() == before
    assert {task.groups for task in evidence.tasks} == {1, 2}
    assert all(rollout.baseline is not None for rollout in evidence.rollouts if rollout.advantage is not None)
    assert {group.rule for group in evidence.groups if group.seal_order} == {"all"}


def test_an_interrupted_migration_leaves_schema_1(golden):
    run_dir = golden("ledger_v1")
    identity = {"run_id": "golden"}
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database, database:
        database.execute("CREATE TABLE tasks (in_the_way)")
    with pytest.raises(LedgerRefused, match="already exists"):
        Ledger.open(run_dir, identity)
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database, database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert "late" not in [row[1] for row in database.execute("PRAGMA table_info(rollouts)")]
        database.execute("DROP TABLE tasks")
    Ledger.open(run_dir, identity).close()
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


@pytest.mark.parametrize("name", ["ledger_v1", "ledger_v2", "ledger_v3", "ledger_v4"])
def test_a_migrated_ledger_has_the_tables_of_a_new_one(golden, tmp_path, name):
    migrated = golden(name)
    Ledger.open(migrated, {"run_id": "golden"}).close()
    Ledger.open(tmp_path / "new", {"run_id": "golden"}).close()
    assert columns(migrated) == columns(tmp_path / "new")


def columns(run_dir):
    """Name, type, NOT NULL and default of every column of every table."""
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: sorted(row[1:] for row in database.execute(f"PRAGMA table_info({table})")) for table in tables}
