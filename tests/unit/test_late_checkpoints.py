"""A checkpoint that a replaced learner finishes after a newer epoch was opened is set aside, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.resume import ResumePreparation
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoop, LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.resume_report import resume_report
from headrace.buffer.audit.verify import verify
from headrace.buffer.errors import CheckpointLate, StaleEpoch
from headrace.buffer.trajectories.types import Batch
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners import checkpoints
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.simulated import SimulatedEnginesConfig, SimulatedLearner, SimulatedLearnerConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases
from support.simulated_lives import CONFIG, feed

GUARD_S = 60
FIRST = PolicyVersion(1, 0)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(path=tmp_path / "run")
    directory.write_beginning(cases.tasks(), "run")
    return directory


async def finish(replay: Replay, version: PolicyVersion) -> None:
    """Finish all rollouts that may start."""
    await replay.reconcile([], "feeder")
    orders = (await replay.issue(8, "feeder", timeout_s=0.0)).orders
    await replay.offer([cases.result(order, version, reward=float(place % 2)) for place, order in enumerate(orders)])


async def trained(replay: Replay, learner: SimulatedLearner, version: PolicyVersion) -> Batch:
    """Take, train and commit one batch."""
    await finish(replay, version)
    batch = await replay.take(version, timeout_s=GUARD_S)
    assert batch is not None
    await replay.commit(batch.lease, await learner.step(batch))
    return batch


async def replaced_learner(replay: Replay, directory: RunDirectory) -> SimulatedLearner:
    """A learner of epoch 1 that has saved 1.1, committed 1.2, and begins to save just when epoch 2 is opened at 1.1."""
    learner = SimulatedLearner(SimulatedLearnerConfig(step_s=0.0, checkpoint_dir=directory.checkpoints))
    assert await replay.open_epoch(None) == FIRST
    await learner.open(None, epoch=1)
    await trained(replay, learner, FIRST)
    saved = await learner.save()
    await replay.checkpointed(saved)
    await trained(replay, learner, PolicyVersion(1, 1))
    assert await replay.open_epoch(saved) == PolicyVersion(2, 1)
    return learner


def loop(replay: Replay, directory: RunDirectory, engines: SimulatedEngineGroup, steps: int) -> LearnerLoop:
    return LearnerLoop(
        LearnerLoopConfig(steps=steps, save_every=1),
        SimulatedLearnerConfig(step_s=0.0, checkpoint_dir=directory.checkpoints),
        replay=replay,
        engines=engines,
        observing=ActorTelemetry(config=TelemetryConfig(), run_dir=directory.path),
    )


@pytest.mark.parametrize("trained_again", [False, True])
async def test_every_learner_opens_beside_a_checkpoint_that_was_finished_late(
    directory: RunDirectory, *, trained_again: bool
) -> None:
    async with (
        asyncio.timeout(GUARD_S),
        Replay(CONFIG, directory=directory, seed=3) as replay,
        SimulatedEngineGroup(SimulatedEnginesConfig(push_s=0.0), directory=directory) as engines,
    ):
        learner = await replaced_learner(replay, directory)
        if trained_again:
            # The same batch from the same weights: the ledger knows the hash chain, under another version.
            second = SimulatedLearner(SimulatedLearnerConfig(step_s=0.0))
            await second.open(checkpoints.read_checkpoint(directory.checkpoints / "1.1"), epoch=2)
            await trained(replay, second, PolicyVersion(2, 1))
        late = await learner.save()
        assert late.version == PolicyVersion(1, 2)
        with pytest.raises(StaleEpoch):
            await replay.checkpointed(late)
        with pytest.raises(CheckpointLate, match=r"checkpoints/1\.2 was finished after another learner had taken over"):
            await replay.open_epoch(late)
        async with loop(replay, directory, engines, 4) as newest, asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(feed(replay, engines))
            end = await newest.run()
            feeding.cancel()
        assert end.version == PolicyVersion(3, 4)
    names = {path.name for path in directory.checkpoints.iterdir()}
    assert "aside-1.2" in names
    assert "1.2" not in names
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.trained_twice, report.steps) == (0, 4)


async def test_a_resume_reports_the_checkpoint_and_goes_on_from_the_one_before(directory: RunDirectory) -> None:
    async with (
        asyncio.timeout(GUARD_S),
        Replay(CONFIG, directory=directory, seed=3) as replay,
    ):
        learner = await replaced_learner(replay, directory)
        assert not resume_report(directory.path, max_staleness=2).checkpoint_is_late
        await learner.save()
    report = resume_report(directory.path, max_staleness=2)
    assert (report.checkpoint, report.checkpoint_is_late) == ("1.2", True)
    said: list[str] = []
    learner_config = LearnerConfig(model_dir="model", checkpoint_dir="checkpoints", snapshot_dir="weights")
    config = SimpleNamespace(buffer=CONFIG, learner=learner_config, service=SimpleNamespace(seed=3))
    preparation = ResumePreparation(config, directory, say=said.append)  # type: ignore[arg-type]
    preparation.prepare()
    assert any(line.startswith("CHECKPOINT 1.2 IS LEFT OUT: a replaced learner finished it") for line in said)
    assert preparation.report is not None
    assert (preparation.report["checkpoint"], preparation.report["lost"]) == ("1.1", 0)
    assert list(preparation.report["checkpoints_left_out"]) == ["1.2"]
    assert not (directory.checkpoints / "1.2").exists()


async def test_an_old_epoch_cannot_say_what_the_engines_serve(directory: RunDirectory) -> None:
    async with (
        asyncio.timeout(GUARD_S),
        Replay(CONFIG, directory=directory, seed=3) as replay,
    ):
        await replaced_learner(replay, directory)
        await replay.served(PolicyVersion(2, 1), epoch=2)
        with pytest.raises(StaleEpoch, match=r"epoch 1 is not the current one \(2\): this learner must end"):
            await replay.served(PolicyVersion(1, 2), epoch=1)
        # Weights of an older epoch may be served: the current learner then says so.
        await replay.served(PolicyVersion(1, 2), epoch=2)


def test_a_replaced_learner_leaves_the_unfinished_save_of_its_successor(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        (tmp_path / f"tmp-{epoch}.7").mkdir(parents=True)
    (tmp_path / "tmp-removed-3.1").mkdir()
    checkpoints.stage(tmp_path, PolicyVersion(2, 9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp-2.9", "tmp-3.7"]
