"""The golden run loads, verifies and can be continued; files of another schema are refused."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.export import export
from headrace.buffer.audit.verify import verify
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger"
CONFIG = cases.SMALL.model_copy(
    update={"batch_size": 8, "group_size": 4, "rule": "count(3) | deadline(1000)", "max_attempts": 2}
)


@pytest.fixture
def run_dir(tmp_path):
    return shutil.copytree(GOLDEN, tmp_path / "run")


async def open_run(run_dir):
    return await ReplayStore.open(run_dir, CONFIG, cases.tasks(), run_id="golden", seed=3)


async def test_the_golden_run_continues(run_dir):
    """A reward above 0 solves nothing by itself."""
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.issued, report.trained, report.leased, report.poison) == (48, 24, 8, 1)
    verdicts = {(attempt.reward, attempt.solved) for attempt in read_evidence(run_dir).attempts}
    assert {(0.1, False), (1.0, True)} <= verdicts
    with closing(sqlite3.connect(run_dir / "archive.db")) as archive:
        assert archive.execute("SELECT count(*) FROM groups").fetchone() == (4,)
    async with await open_run(run_dir) as store:
        assert store.status().counters["rollouts_reissued"] == 3
        (evaluation,) = await store.evaluations.recorded("held out")
        assert (evaluation.reward, evaluation.solved) == (1.0, True)
        version = PolicyVersion(2, 3)
        again = await store.issue(3, version)
        assert {(order.attempt, order.group_id) for order in again} == {(2, "g000010")}
        await store.offer_many([cases.result(order, version, reward=0.0) for order in again])
    report = verify(run_dir)
    assert report.problems == ()
    assert report.sealed == 8 + 3


def test_breakdowns_are_in_the_ledger_and_in_the_archive(run_dir):
    ended = [attempt for attempt in read_evidence(run_dir).attempts if attempt.reward is not None]
    spent = [attempt.breakdown for attempt in ended if attempt.breakdown]
    assert len(spent) > 8
    assert {(breakdown.wall_s, breakdown.parts_s["tool.bash"]) for breakdown in spent} == {(4.0, 1.5)}


async def test_groups_sealed_with_another_kind_from_now_on_are_checked_by_it(run_dir):
    """A run whose configuration was changed by hand: each group says by which formula it was sealed."""
    config = CONFIG.model_copy(update={"advantage": "leave_one_out"})
    async with await ReplayStore.open(run_dir, config, cases.tasks(), run_id="golden", seed=3) as store:
        version = PolicyVersion(2, 3)
        await store.keep_in_flight(())
        for _ in range(3):
            for number, order in enumerate(await store.issue(1000, version)):
                await store.offer_many([cases.result(order, version, reward=number % 3 / 2)])
            batch = await store.take(version, 2, timeout_s=0.0)
            version = PolicyVersion(2, version.step + 1)
            await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
    assert verify(run_dir).problems == ()
    assert {"grpo", "leave_one_out"} <= {group.advantage for group in read_evidence(run_dir).groups}


def test_an_export_contains_the_archive_and_changes_nothing(run_dir, tmp_path):
    before = [(run_dir / name).read_bytes() for name in ("ledger.db", "archive.db")]
    rows = export(run_dir, tmp_path / "out").rows
    assert rows["groups"] == len(read_evidence(run_dir).groups) == 12
    assert [(run_dir / name).read_bytes() for name in ("ledger.db", "archive.db")] == before


@pytest.mark.parametrize(("application", "schema"), [(0x48524C31, 1), (0x48524C31, 6), (0x48524C47, 2), (7, 0)])
def test_a_ledger_of_another_schema_is_refused_in_one_line(run_dir, application, schema):
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database:
        database.execute(f"PRAGMA application_id = {application}")
        database.execute(f"PRAGMA user_version = {schema}")
    before = (run_dir / "ledger.db").read_bytes()
    for read in (verify, read_evidence, lambda path: Ledger.open(path, {"run_id": "golden"})):
        with pytest.raises(LedgerRefused, match=r"ledger\.db is of an unreleased version of headrace") as refused:
            read(run_dir)
        assert "\n" not in str(refused.value)
        assert "start a new run in another directory" in str(refused.value)
    assert (run_dir / "ledger.db").read_bytes() == before


def test_an_archive_of_another_schema_is_named(run_dir):
    with closing(sqlite3.connect(run_dir / "archive.db")) as database:
        database.execute("PRAGMA user_version = 6")
    with pytest.raises(LedgerRefused, match=r"archive\.db is not the archive of the ledger beside it: it has schema 6"):
        Ledger.open(run_dir, {"run_id": "golden"})
    assert any("archive.db has schema 6" in problem for problem in verify(run_dir).problems)
