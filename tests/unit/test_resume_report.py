"""What a resume will do, told before, is what it does."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.actors.resuming import Resuming
from headrace.actors.run_directory import RunDirectory
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.evidence import read_evidence
from headrace.buffer.records import RolloutState
from headrace.buffer.resume_report import decile_edges, resume_report
from headrace.buffer.store import ReplayStore
from headrace.buffer.types import StepReport
from headrace.buffer.versions import PolicyVersion
from headrace.policies.checkpoints import latest_checkpoint

TESTS = Path(__file__).parents[1]
cases = SimpleNamespace(**runpy.run_path(str(TESTS / "replay_cases.py")))


@pytest.fixture
def run_dir(tmp_path):
    """A run of an older schema: killed after a step past its checkpoint, with a batch leased and rollouts in flight."""
    return shutil.copytree(TESTS / "golden" / "ledger_v1", tmp_path / "run")


def untouched(folder):
    """Every file but SQLite's index of the log."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".db-shm"}


def test_it_tells_what_is_kept_restarted_and_lost(run_dir):
    report = resume_report(run_dir, max_staleness=2)
    assert (report.checkpoint, report.epoch, report.steps_kept, report.steps_undone) == ("1.2", 3, 2, 1)
    assert (report.trained, report.sealed, report.waiting, report.again) == (8, 4, 1, 8)
    assert (report.restarted, report.pending, report.ended, report.lost) == (2, 1, 0, 0)
    assert report.kept + report.restarted + report.pending + report.ended == 24
    assert sum(decile.kept for decile in report.deciles) == report.kept
    assert sum(decile.again for decile in report.deciles) == report.again
    assert sum(decile.restarted for decile in report.deciles) == report.restarted
    assert report.to_json()["kept"] == 21
    assert report.lines()[-1].startswith("     restarted")


async def test_the_batches_are_issued_again_as_it_says(run_dir):
    report = resume_report(run_dir, max_staleness=2)
    members = {batch.batch_id: batch.members for batch in read_evidence(run_dir).batches}
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="golden", seed=3) as store:
        version = await store.open_epoch(latest_checkpoint(run_dir / "checkpoints"))
        assert version.epoch == report.epoch
        assert version.step == report.steps_kept
        taken = []
        for _ in report.batches:
            batch = await store.take(version, version.epoch, timeout_s=0.0)
            version = PolicyVersion(version.epoch, version.step + 1)
            done = StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False)
            await store.commit(batch.lease, done)
            taken.append(batch)
        assert tuple(batch.lease.batch_id for batch in taken) == report.batches
        for batch in taken:
            again = [(item.rollout_id, item.attempt) for item in batch.items]
            assert again == [(member.rollout_id, member.attempt) for member in members[batch.lease.batch_id]]
        assert store.status().rollouts[RolloutState.TRAINED] == report.trained + report.again


def test_a_bound_that_the_fork_breaks_is_told(run_dir):
    assert resume_report(run_dir, max_staleness=2).over_bound == 0
    tight = resume_report(run_dir, max_staleness=0)
    assert 0 < tight.over_bound <= tight.again
    assert any("over the bound" in line for line in tight.lines())


async def test_what_it_says_of_the_bound_counts_the_steps_of_batches_that_stay_whole(tmp_path):
    """The first batch was skipped when it was trained again: what was sampled after it is on another line now."""
    first, second, third = (PolicyVersion(1, number) for number in range(3))
    async with await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(), run_id="run", seed=3) as store:

        async def finish(orders, version):
            await store.offer_many([cases.result(order, version) for order in orders])

        async def step(version, skipped=False):
            batch = await store.take(version, version.epoch, timeout_s=0.0)
            after = version if skipped else PolicyVersion(version.epoch, version.step + 1)
            await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=skipped))
            return batch.lease.batch_id

        version = await store.open_epoch(None)
        await finish(await store.issue(4, version), first)
        await finish(await store.issue(4, version), first)
        slow = await store.issue(4, version)
        await step(first)
        await step(second)
        await finish(await store.issue(4, third), third)
        await step(third)
        await finish(slow, second)
        last = await step(PolicyVersion(1, 3))
        assert resume_report(tmp_path, max_staleness=2).over_bound == 0
        await step(await store.open_epoch(None), skipped=True)
        report = resume_report(tmp_path, max_staleness=2)
        assert report.over_bound == 4, "1.2 at 3.1, three updates; then 1.1 at 3.1, and not at 3.2"
        version = await store.open_epoch(None)
        taken = [await step(version, skipped=True), await step(version), await step(PolicyVersion(3, 1))]
        assert taken == [report.batches[0], report.batches[1], last]
        assert store.status().counters["rollouts_reissued"] == report.over_bound


def test_without_a_checkpoint_all_begins_again_and_nothing_is_lost(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    report = resume_report(run_dir, max_staleness=9)
    assert (report.checkpoint, report.steps_kept, report.trained, report.lost) == (None, 0, 0, 0)
    assert report.again == 16
    assert report.lines()[0].startswith("resume from the start as epoch 3")


def test_it_changes_nothing(run_dir):
    before = untouched(run_dir)
    resume_report(run_dir, max_staleness=2)
    after = untouched(run_dir)
    assert {path: after[path] for path in before} == before


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerRefused, match=r"holds no ledger.db"):
        resume_report(tmp_path, max_staleness=2)


def test_equal_durations_share_a_decile():
    assert decile_edges([2.0] * 50) == []
    assert decile_edges(range(1, 101)) == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert decile_edges([1.0] * 99 + [9.0]) == [1.0]


def test_the_command_says_it_and_keeps_it_in_the_run_directory(run_dir):
    said = []
    config = SimpleNamespace(buffer=cases.SMALL)
    resuming = Resuming(config, RunDirectory(path=run_dir), say=said.append)
    resuming.tell()
    report = resume_report(run_dir, max_staleness=2)
    assert said == report.lines()
    assert json.loads((run_dir / "resumes" / "3.json").read_bytes()) == json.loads(json.dumps(resuming.told))
    assert resuming.told["kept"] == report.kept


def test_a_run_that_has_lost_something_does_not_go_on(run_dir):
    for path in (run_dir / "trajectories").iterdir():
        path.unlink()
    said = []
    resuming = Resuming(SimpleNamespace(buffer=cases.SMALL), RunDirectory(path=run_dir), say=said.append)
    with pytest.raises(LedgerRefused, match=r"rollouts are lost .*put back what is missing"):
        resuming.tell()
    assert resuming.told["lost"] > 0
    assert any("lost" in line for line in said)


@pytest.mark.parametrize("left", ["checkpoints", "trajectories"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_lost_ledger_is_no_new_run(run_dir, left, missing):
    shutil.rmtree(run_dir / {"checkpoints": "trajectories", "trajectories": "checkpoints"}[left])
    (run_dir / "ledger.db").unlink()
    if not missing:
        (run_dir / "ledger.db").touch()
    with pytest.raises(LedgerRefused, match=rf"missing or empty, but there is .*{left}.*put the ledger back"):
        Resuming(SimpleNamespace(buffer=cases.SMALL), RunDirectory(path=run_dir), say=print).tell()


def test_a_run_whose_process_died_while_it_made_the_ledger_begins(tmp_path):
    (tmp_path / "ledger.db").touch()
    with pytest.raises(LedgerRefused, match="in which nothing is"):
        resume_report(tmp_path, max_staleness=2)
    said = []
    Resuming(SimpleNamespace(buffer=cases.SMALL), RunDirectory(path=tmp_path), say=said.append).tell()
    assert said == ["nothing was recorded yet: the run begins"]


def test_a_run_of_the_newest_schema_is_told_too(tmp_path):
    run_dir = shutil.copytree(TESTS / "golden" / "ledger_v2", tmp_path / "run")
    issued = len(read_evidence(run_dir).rollouts)
    report = resume_report(run_dir, max_staleness=2)
    assert report.lost == 0, report.problems
    assert report.kept + report.restarted + report.pending + report.ended == issued
    assert report.steps_kept + report.steps_undone > 0
