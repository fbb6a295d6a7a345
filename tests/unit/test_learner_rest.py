"""A learner whose node is drained: it saves a checkpoint and trains nothing that the end of the node would undo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training import learner as learner_module
from headrace.actors.training.learner import LearnerLoop, LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.policies.learners.simulated import SimulatedEnginesConfig, SimulatedLearnerConfig
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases
from support.recorded_spans import attributes_of, recorded_spans
from support.simulated_lives import CONFIG, feed

GUARD_S = 60
REST_S = 0.5


@pytest.fixture
async def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LearnerLoop]:
    """A learner on node n1 that would save after 1,000 steps, and trains."""
    monkeypatch.setattr(learner_module, "this_node", lambda: "n1")
    directory = RunDirectory(path=tmp_path / "run")
    directory.write_beginning(cases.tasks(), "run")
    observing = ActorTelemetry(config=TelemetryConfig(), run_dir=directory.path)
    async with (
        asyncio.timeout(GUARD_S),
        Replay(CONFIG, directory=directory, seed=3) as replay,
        SimulatedEngineGroup(SimulatedEnginesConfig(push_s=0.0), directory=directory) as engines,
        LearnerLoop(
            LearnerLoopConfig(steps=10_000, save_every=1000),
            SimulatedLearnerConfig(step_s=0.0, checkpoint_dir=directory.checkpoints),
            replay=replay,
            engines=engines,
            observing=observing,
        ) as learner,
        asyncio.TaskGroup() as tasks,
    ):
        feeding = tasks.create_task(feed(replay, engines))
        running = tasks.create_task(learner.run())
        await reached(learner, 1)
        yield learner
        await learner.drain()
        await running
        feeding.cancel()


async def step_of(learner: LearnerLoop) -> int:
    version = (await learner.status()).version
    return 0 if version is None else version.step


async def reached(learner: LearnerLoop, step: int) -> None:
    while await step_of(learner) < step:  # noqa: ASYNC110 - as its service asks
        await asyncio.sleep(0.01)


async def test_it_saves_takes_no_batch_and_goes_on_if_the_node_does_not_end(
    learner: LearnerLoop, tmp_path: Path
) -> None:
    assert await learner.rest("n1", REST_S)
    step = await step_of(learner)
    assert (tmp_path / "run" / "checkpoints" / f"1.{step}").is_dir()
    began_s = asyncio.get_running_loop().time()
    await reached(learner, step + 1)
    assert asyncio.get_running_loop().time() - began_s > REST_S / 2


async def test_a_drain_of_the_run_ends_the_rest(learner: LearnerLoop) -> None:
    assert await learner.rest("n1", 10 * GUARD_S)


async def test_the_drain_of_another_node_is_of_no_consequence(learner: LearnerLoop) -> None:
    for node in ("n2", ""):
        assert not await learner.rest(node, 10 * GUARD_S)
    await reached(learner, await step_of(learner) + 2)


async def test_the_span_of_a_step_names_its_version_batch_and_rollouts(
    learner: LearnerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded_spans(monkeypatch, learner_module) as recorded:
        await reached(learner, await step_of(learner) + 3)
        steps = [attributes_of(span) for span in recorded.named(names.STEP)]
    numbers = [step[names.STEP_NUMBER] for step in steps if isinstance(step[names.STEP_NUMBER], int)]
    assert numbers == list(range(numbers[0], numbers[0] + len(steps)))
    assert [step[names.STEP_VERSION] for step in steps] == [f"1.{number}" for number in numbers]
    assert {step[names.STEP_ROLLOUTS] for step in steps} == {CONFIG.batch_size}
    assert len({step[names.STEP_BATCH] for step in steps}) == len(steps)
