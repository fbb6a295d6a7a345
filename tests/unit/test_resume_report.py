"""What a resume will do, told before, is what it does."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.resume import ResumePreparation
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.resume_report import decile_edges, resume_report
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import RolloutState
from headrace.buffer.errors import CheckpointMissing, LedgerMismatch, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoint_retention import begin_evaluation, best_checkpoint, end_evaluation
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    fold_chain,
    publish,
    stage,
    usable_checkpoint,
    write_manifest,
)
from headrace.policies.learners.config import LearnerConfig
from support import replay_cases as cases

TESTS = Path(__file__).parents[1]
LEARNER = LearnerConfig(model_dir="model", checkpoint_dir="checkpoints", snapshot_dir="weights")
"""Of a model whose directory is not there, so only the objective of a checkpoint can differ from it."""
CONFIG = SimpleNamespace(buffer=cases.SMALL, learner=LEARNER)


@pytest.fixture
def run_dir(tmp_path):
    """A run killed after a step past its checkpoint, with a batch leased and rollouts in flight."""
    return shutil.copytree(TESTS / "golden" / "ledger", tmp_path / "run")


def untouched(folder):
    """Every file but SQLite's index of the log."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".db-shm"}


def test_the_report_counts_kept_restarted_and_lost_rollouts(run_dir):
    report = resume_report(run_dir, max_staleness=2)
    assert (report.checkpoint, report.epoch, report.steps_kept, report.steps_undone) == ("1.2", 3, 2, 1)
    assert (report.trained, report.sealed, report.waiting, report.again) == (16, 8, 0, 16)
    assert (report.restarted, report.pending, report.ended, report.lost) == (2, 5, 1, 0)
    assert report.kept + report.restarted + report.pending + report.ended == 48
    assert sum(decile.kept for decile in report.deciles) == report.kept - 16, "of open groups"
    assert sum(decile.again for decile in report.deciles) == report.again
    assert sum(decile.restarted for decile in report.deciles) == report.restarted
    assert report.to_json()["kept"] == 40
    assert report.lines()[-1].startswith("     restarted")


async def test_the_reported_batches_are_issued_again(run_dir):
    report = resume_report(run_dir, max_staleness=2)
    members = {batch.batch_id: batch.members for batch in read_evidence(run_dir).batches}
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="golden", seed=3) as store:
        version = await store.open_epoch(usable_checkpoint(run_dir / "checkpoints").checkpoint)
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


def test_rollouts_over_the_bound_after_a_fork_are_reported(run_dir):
    assert resume_report(run_dir, max_staleness=2).over_bound == 0
    tight = resume_report(run_dir, max_staleness=0)
    assert 0 < tight.over_bound <= tight.again
    assert any("over the bound" in line for line in tight.lines())


async def test_the_reported_staleness_counts_only_steps_of_undissolved_batches(tmp_path):
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


def test_without_a_checkpoint_all_steps_are_undone_and_nothing_is_lost(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    report = resume_report(run_dir, max_staleness=9)
    assert (report.checkpoint, report.steps_kept, report.trained, report.lost) == (None, 0, 0, 0)
    assert report.again == 32
    assert report.lines()[0].startswith("resume from the start as epoch 3")


def test_the_resume_report_changes_nothing(run_dir):
    before = untouched(run_dir)
    resume_report(run_dir, max_staleness=2)
    after = untouched(run_dir)
    assert {path: after[path] for path in before} == before


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerRefused, match=r"has no ledger.db"):
        resume_report(tmp_path, max_staleness=2)


def test_equal_durations_share_a_decile():
    assert decile_edges([2.0] * 50) == []
    assert decile_edges(range(1, 101)) == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert decile_edges([1.0] * 99 + [9.0]) == [1.0]


def test_the_command_prints_the_report_and_stores_it_in_the_run_directory(run_dir):
    said = []
    preparation = ResumePreparation(CONFIG, RunDirectory(path=run_dir), say=said.append)
    preparation.prepare()
    report = resume_report(run_dir, max_staleness=2)
    assert said == report.lines()
    assert json.loads((run_dir / "resumes" / "3.json").read_bytes()) == json.loads(json.dumps(preparation.report))
    assert preparation.report["kept"] == report.kept


def test_a_run_with_lost_rollouts_is_not_resumed(run_dir):
    for path in (run_dir / "trajectories").iterdir():
        path.unlink()
    said = []
    preparation = ResumePreparation(CONFIG, RunDirectory(path=run_dir), say=said.append)
    with pytest.raises(LedgerRefused, match=r"rollouts are lost .*restore the missing files"):
        preparation.prepare()
    assert preparation.report["lost"] > 0
    assert any("lost" in line for line in said)


def resuming(run_dir, said, learner=LEARNER, **options):
    directory = RunDirectory(path=run_dir)
    if not directory.identity.exists():
        directory.write_beginning(cases.tasks(), "golden")
    config = SimpleNamespace(buffer=cases.SMALL, learner=learner, service=SimpleNamespace(seed=3), mix=lambda: ())
    return ResumePreparation(config, directory, say=said.append, **options)


def lose(root):
    shutil.rmtree(root)


def empty(root):
    for path in root.iterdir():
        shutil.rmtree(path)


def hollow(root):
    """Directories without files, as a copy that was broken off leaves them."""
    for path in (path for folder in root.iterdir() for path in folder.iterdir()):
        path.unlink()


@pytest.mark.parametrize("damage", [lose, empty, hollow])
def test_a_run_without_its_checkpoints_does_not_start_over_automatically(run_dir, damage):
    damage(run_dir / "checkpoints")
    before = read_evidence(run_dir)
    with pytest.raises(LedgerRefused, match=r"ledger recorded 1\.2: restore the folder.*--from-start") as refused:
        resuming(run_dir, []).prepare()
    assert "\n" not in str(refused.value)
    assert read_evidence(run_dir).commits == before.commits


async def test_a_learner_without_its_checkpoints_does_not_start_over(run_dir):
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="golden", seed=3) as store:
        with pytest.raises(CheckpointMissing, match=r"recorded checkpoint 1\.2.*--from-start"):
            await store.open_epoch(None)
        assert store.status().steps_committed == 3


def test_resuming_from_the_start_undoes_all_steps(run_dir):
    """The trajectories of the first steps are gone, as they are once three checkpoints cover them."""
    with closing(sqlite3.connect(run_dir / "trajectories" / "000001.db")) as blobs, blobs:
        blobs.execute("DELETE FROM trajectories WHERE rollout_id LIKE 'g000000-%'")
    said = []
    resuming(run_dir, said, from_start=True).prepare()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["aside-1.2"]
    evidence = read_evidence(run_dir)
    assert evidence.surviving == []
    assert any("IS LEFT OUT: the run restarts" in line for line in said)
    assert verify(run_dir).lost == 0
    again = [rollout for rollout in evidence.rollouts if rollout.rollout_id.startswith("g000000-")]
    assert {rollout.state for rollout in again} == {RolloutState.PENDING}
    resuming(run_dir, said).prepare()


def test_a_run_that_cannot_restart_keeps_its_checkpoints(run_dir):
    (run_dir / "archive.db").unlink()
    with pytest.raises(LedgerMismatch, match=r"archive\.db, which is missing"):
        resuming(run_dir, [], from_start=True).prepare()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["1.2"]
    resuming(run_dir, []).prepare()


def test_a_run_without_checkpoints_and_archive_is_refused_in_one_line(run_dir):
    (run_dir / "archive.db").unlink()
    lose(run_dir / "checkpoints")
    with pytest.raises(LedgerRefused, match=r"contains no usable checkpoint"):
        resuming(run_dir, []).prepare()


def test_a_damaged_checkpoint_is_skipped_and_named(run_dir):
    """Version 1.1 is whole, and what is after it is undone."""
    evidence = read_evidence(run_dir)
    [newest] = evidence.witnesses
    first, second = evidence.commits[:2]
    members = {batch.batch_id: batch.members for batch in evidence.batches}
    stepped = [
        SteppedBatch(
            batch_id=commit.batch_id,
            members=tuple((member.rollout_id, member.attempt) for member in members[commit.batch_id]),
            skipped=False,
        )
        for commit in (first, second)
    ]
    root = run_dir / "checkpoints"
    shutil.rmtree(newest.path)
    for commit, batches in ((first, stepped[:1]), (second, stepped)):
        staged = stage(root, commit.version)
        (staged / "model").write_bytes(b"weights" * 100)
        write_manifest(
            staged, Manifest(version=commit.version, previous_chain="", chain=commit.chain, batches=tuple(batches))
        )
        publish(staged, commit.version)
    (root / str(second.version) / "model").write_bytes(b"weights" * 99)
    said = []
    about = resuming(run_dir, said)
    about.prepare()
    assert said[0].startswith(f"CHECKPOINT {second.version} IS LEFT OUT: ")
    assert "has 693 bytes, but 700 were written" in said[0]
    assert (root / f"aside-{second.version}" / "model").exists()
    assert about.report["checkpoint"] == str(first.version)
    assert list(about.report["checkpoints_left_out"]) == [str(second.version)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"chain": "", "previous_chain": "", "batches": [], "version": "1.2"}, None),
        ({"format": 3}, "has format 3, which is of an unreleased version of headrace: start a new run"),
    ],
)
def test_a_checkpoint_of_another_run_or_a_newer_version_is_refused_in_one_line(run_dir, change, told):
    manifest = run_dir / "checkpoints" / "1.2" / "headrace.json"
    document = json.loads(manifest.read_text()) | change
    if told is None:
        stranger = SteppedBatch(batch_id="b000001", members=(("g000077-0", 1),), skipped=False)
        shutil.rmtree(manifest.parent)
        staged = stage(run_dir / "checkpoints", PolicyVersion(1, 2))
        batches = (stranger,)
        chain = fold_chain("", batches)
        write_manifest(staged, Manifest(version=PolicyVersion(1, 2), previous_chain="", chain=chain, batches=batches))
        publish(staged, PolicyVersion(1, 2))
        told = "belongs to another run or an undone branch, or is newer than this ledger: move it elsewhere"
    else:
        manifest.write_text(json.dumps(document))
    with pytest.raises(LedgerRefused, match=told) as refused:
        resuming(run_dir, []).prepare()
    assert "\n" not in str(refused.value)
    assert (run_dir / "checkpoints" / "1.2").is_dir()


def test_a_checkpoint_of_an_epoch_that_the_ledger_does_not_know_is_refused(run_dir):
    """As after the ledger was replaced by an older copy."""
    batches = (SteppedBatch(batch_id="b000009", members=(("g000077-0", 1),), skipped=False),)
    staged = stage(run_dir / "checkpoints", PolicyVersion(7, 9))
    chain = fold_chain("", batches)
    write_manifest(staged, Manifest(version=PolicyVersion(7, 9), previous_chain="", chain=chain, batches=batches))
    publish(staged, PolicyVersion(7, 9))
    with pytest.raises(LedgerRefused, match=r"7\.9 belongs to another run.* or is newer than this ledger"):
        resuming(run_dir, []).prepare()


def test_a_checkpoint_of_another_objective_is_refused_before_the_run_starts(run_dir):
    manifest = run_dir / "checkpoints" / "1.2" / "headrace.json"
    document = json.loads(manifest.read_text()) | {"trained": {"objective": "gspo"}}
    manifest.write_text(json.dumps(document))
    with pytest.raises(LedgerRefused, match=r"trained with objective gspo, .* objective grpo: set learner\.obj"):
        resuming(run_dir, []).prepare()
    assert not (run_dir / "resumes").exists()
    resuming(run_dir, [], learner=LEARNER.model_copy(update={"objective": "gspo"})).prepare()


def test_a_restart_from_the_beginning_forgets_the_best_checkpoint(run_dir):
    root = run_dir / "checkpoints"
    begin_evaluation(root, 2)
    end_evaluation(root, tag="step-2", success=0.9, versions={"1.2": 10})
    assert best_checkpoint(root)[0].version == "1.2"
    resuming(run_dir, [], from_start=True).prepare()
    assert best_checkpoint(root) is None
    assert (root / "aside-1.2").is_dir()


@pytest.mark.parametrize("left", ["checkpoints", "trajectories"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_run_with_a_lost_ledger_is_not_mistaken_for_a_new_run(run_dir, left, missing):
    shutil.rmtree(run_dir / {"checkpoints": "trajectories", "trajectories": "checkpoints"}[left])
    (run_dir / "ledger.db").unlink()
    if not missing:
        (run_dir / "ledger.db").touch()
    with pytest.raises(LedgerRefused, match=rf"missing or empty, but there is .*{left}.*restore the ledger"):
        ResumePreparation(CONFIG, RunDirectory(path=run_dir), say=print).prepare()


def test_a_run_that_died_while_creating_the_ledger_starts(tmp_path):
    (tmp_path / "ledger.db").touch()
    with pytest.raises(LedgerRefused, match="or an empty one"):
        resume_report(tmp_path, max_staleness=2)
    said = []
    ResumePreparation(CONFIG, RunDirectory(path=tmp_path), say=said.append).prepare()
    assert said == ["nothing was recorded yet: the run starts from the beginning"]
