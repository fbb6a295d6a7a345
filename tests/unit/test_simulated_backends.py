"""Simulated engines, learner, agent and evaluator, each alone, in virtual time."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.agents.programs.simulated import SimulatedAgent, SimulatedAgentConfig
from headrace.actors.evaluation.graders.evaluator import simulated_verdict
from headrace.actors.evaluation.graders.verdict import EvaluationRequest
from headrace.actors.rollouts.sessions import SimulatedSession
from headrace.actors.run.sources import problem_digest, refuse_overlap
from headrace.actors.runtime.simulated import engines
from headrace.actors.runtime.simulated.durations import Durations, DurationsConfig
from headrace.actors.runtime.simulated.engines import EngineWatch, SimulatedEngineGroup
from headrace.actors.runtime.simulated.tasks import simulated_tasks
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.trajectories.types import Batch, BatchId, BatchItem, BatchLease, GroupId, RolloutId, Trajectory
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion
from headrace.policies.errors import LearnerNotOpen
from headrace.policies.learners.checkpoints import read_checkpoint, read_manifest
from headrace.policies.learners.simulated import (
    PushMode,
    Served,
    SimulatedEngine,
    SimulatedEnginesConfig,
    SimulatedLearner,
    SimulatedLearnerConfig,
)
from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.tracing import span_names
from support.recorded_spans import attributes_of, recorded_spans

SWE = DurationsConfig(mean_s=596.4, median_s=520.2, cap_s=1800)


def spans_of(completion: Completion) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.version.step) for span in completion.spans]


async def changing(engine: SimulatedEngine, *changes: tuple[float, Served]) -> None:
    """Tell the engine at these times."""
    loop = asyncio.get_running_loop()
    for at_s, served in changes:
        await asyncio.sleep(at_s - loop.time())
        engine.set_served(served)


def one_turn(tokens: int, seconds: float, *changes: tuple[float, Served]) -> tuple[Completion, float]:
    """A turn that begins at second 1, and when it ended."""

    async def main() -> tuple[Completion, float]:
        engine = SimulatedEngine()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(changing(engine, *changes))
            await asyncio.sleep(1)
            completion = (await engine.generate(tokens, seconds)).completion
            ended_s = asyncio.get_running_loop().time()
        return completion, ended_s

    return run_virtual(main())


def served(number: int, step: int, *, generating: bool = True) -> Served:
    return Served(number=number, version=PolicyVersion(1, step), generating=generating)


def test_tokens_carry_the_version_served_while_they_were_sampled() -> None:
    completion, ended_s = one_turn(10, 10, (0, served(1, 3)), (4, served(2, 4)), (9, served(3, 5)))
    assert spans_of(completion) == [(0, 3, 3), (3, 8, 4), (8, 10, 5)]
    assert ended_s == 11


def test_the_clock_of_a_turn_stops_during_a_pause() -> None:
    pause, resumed = served(2, 3, generating=False), served(3, 4)
    completion, ended_s = one_turn(10, 10, (0, served(1, 3)), (6, pause), (106, resumed))
    assert spans_of(completion) == [(0, 5, 3), (5, 10, 4)]
    assert ended_s == 111


def test_nothing_is_generated_before_the_first_version() -> None:
    completion, ended_s = one_turn(4, 2, (50, served(1, 0)))
    assert spans_of(completion) == [(0, 4, 0)]
    assert ended_s == 52


def test_an_older_engine_state_is_ignored() -> None:
    completion, _ = one_turn(4, 4, (0, served(5, 7)), (2, served(4, 6)))
    assert spans_of(completion) == [(0, 4, 7)]


@given(
    tokens=st.integers(1, 50),
    seconds=st.floats(0, 100),
    gaps=st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=8),
)
def test_spans_cover_every_token_once_and_versions_never_decrease(
    tokens: int, seconds: float, gaps: list[tuple[float, bool]]
) -> None:
    changes, at_s = [(0.0, served(1, 0))], 0.0
    for number, (gap_s, generating) in enumerate(gaps, start=1):
        at_s += gap_s
        changes.append((at_s, served(number + 1, number, generating=generating)))
    changes.append((at_s + 1, served(len(changes) + 1, len(changes))))
    completion, _ = one_turn(tokens, seconds, *changes)
    spans = spans_of(completion)
    assert [start for start, _, _ in spans] == [0, *(end for _, end, _ in spans[:-1])]
    assert spans[-1][1] == tokens
    assert all(before[2] < after[2] for before, after in pairwise(spans))
    assert len(completion.output_ids) == len(completion.logprobs) == tokens


def push_times(mode: PushMode) -> tuple[list[float], list[float]]:
    """Two workers, each with a rollout of 100 s from second 5 and one that wants to begin at 20; a push at 10 that
    takes 5 s. When rollouts of the second kind began, and when those of the first ended."""

    async def rollout(watch: EngineWatch, at_s: float, began: list[float], ended: list[float]) -> None:
        await asyncio.sleep(at_s)
        await watch.begin()
        began.append(asyncio.get_running_loop().time())
        await watch.engine.generate(4, 100)
        ended.append(asyncio.get_running_loop().time())
        await watch.end()

    async def main() -> tuple[list[float], list[float]]:
        group = SimulatedEngineGroup(SimulatedEnginesConfig(push=mode, push_s=5))
        learner = SimulatedLearner(SimulatedLearnerConfig())
        await learner.open(None, epoch=1)
        began, ended, others = [], [], []
        async with EngineWatch(group, "a") as one, EngineWatch(group, "b") as two:
            await group.push(await learner.snapshot(), rollouts_in_flight=0)
            assert asyncio.get_running_loop().time() == 5
            async with asyncio.TaskGroup() as tasks:
                for watch in (one, two):
                    tasks.create_task(rollout(watch, 0, others, ended))
                    tasks.create_task(rollout(watch, 15, began, others))
                await asyncio.sleep(5)
                await group.push(await learner.snapshot(), rollouts_in_flight=2)
        assert (await group.status()).pushes == 2
        return began, ended

    return run_virtual(main())


def test_the_push_mode_decides_when_rollouts_begin_and_end() -> None:
    assert push_times(PushMode.OVERLAP) == ([20, 20], [105, 105])
    assert push_times(PushMode.PAUSE) == ([20, 20], [110, 110])
    assert push_times(PushMode.DRAIN) == ([110, 110], [105, 105])


def test_a_drain_does_not_wait_for_a_silent_worker() -> None:
    async def main() -> float:
        group = SimulatedEngineGroup(SimulatedEnginesConfig(push=PushMode.DRAIN, push_s=0))
        learner = SimulatedLearner(SimulatedLearnerConfig())
        await learner.open(None, epoch=1)
        async with EngineWatch(group, "dies") as watch:
            await group.push(await learner.snapshot(), rollouts_in_flight=0)
            await watch.begin()
        died_s = asyncio.get_running_loop().time()
        await group.push(await learner.snapshot(), rollouts_in_flight=1)
        return asyncio.get_running_loop().time() - died_s

    assert 0 < run_virtual(main()) <= 60


def test_a_dead_learners_weights_are_not_served() -> None:
    async def main() -> None:
        group = SimulatedEngineGroup(SimulatedEnginesConfig(push_s=1))
        for epoch in (2, 1):
            learner = SimulatedLearner(SimulatedLearnerConfig())
            await learner.open(None, epoch=epoch)
            await group.push(await learner.snapshot(), rollouts_in_flight=0)
        assert (await group.status()).served.version == PolicyVersion(2, 0)

    run_virtual(main())


def test_each_served_push_is_a_span_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        group, learner = (
            SimulatedEngineGroup(SimulatedEnginesConfig(push_s=1)),
            SimulatedLearner(SimulatedLearnerConfig()),
        )
        for epoch in (2, 1):
            await learner.open(None, epoch=epoch)
            await group.push(await learner.snapshot(), rollouts_in_flight=0)

    with recorded_spans(monkeypatch, engines) as spans:
        run_virtual(main())
    pushed = spans.one(span_names.PUSH)
    assert attributes_of(pushed) == {span_names.PUSH_VERSION: "2.0", span_names.PUSH_TRANSPORT: "simulated"}
    assert pushed.parent is None


def batch(number: int) -> Batch:
    item = BatchItem(
        rollout_id=RolloutId(f"g{number}-0"),
        group_id=GroupId(f"g{number}"),
        attempt=1,
        reward=1.0,
        advantage=0.5,
        staleness=2,
        trajectory=Trajectory(rows=(), temperature=1.0),
    )
    lease = BatchLease(batch_id=BatchId(f"b{number}"), epoch=1)
    return Batch(lease=lease, version=PolicyVersion(1, number), items=(item,))


def test_a_simulated_learner_spends_time_and_writes_chained_checkpoints(tmp_path: Path) -> None:
    async def main() -> None:
        learner = SimulatedLearner(SimulatedLearnerConfig(step_s=240, checkpoint_dir=tmp_path))
        with pytest.raises(LearnerNotOpen):
            await learner.save()
        await learner.open(None, epoch=1)
        for number in range(3):
            report = await learner.step(batch(number))
        assert (asyncio.get_running_loop().time(), report.version) == (720, PolicyVersion(1, 3))
        first = await learner.save()
        await learner.step(batch(3))
        second = await learner.save()
        assert read_checkpoint(tmp_path / "1.3") == first
        assert read_manifest(tmp_path / "1.4").previous_chain == first.chain
        again = SimulatedLearner(SimulatedLearnerConfig())
        state = await again.open(second, epoch=2)
        assert (state.step, state.chain) == (4, second.chain)
        assert (await again.step(batch(4))).version == PolicyVersion(2, 5)

    run_virtual(main())


@pytest.mark.parametrize("cap_s", [600.0, 1800.0, 1e9])
def test_the_configured_mean_matches_the_drawn_durations(cap_s: float) -> None:
    durations = Durations(SWE.model_copy(update={"cap_s": cap_s}), seed=3)
    drawn = [durations.draw_s(str(key)) for key in range(20_000)]
    assert math.isclose(fmean(drawn), durations.mean_s, rel_tol=0.02)
    assert math.isclose(median(drawn), 520.2, rel_tol=0.03)
    assert max(drawn) <= cap_s


def test_recorded_durations_are_drawn_unchanged() -> None:
    durations = Durations(DurationsConfig(recorded_s=(1.0, 2.0, 900.0), cap_s=600), seed=0)
    assert {durations.draw_s(str(key)) for key in range(100)} == {1.0, 2.0, 600.0}
    assert durations.mean_s == 201.0


@pytest.mark.parametrize("settings", [{"mean_s": 1, "median_s": 2}, {"recorded_s": (1.0, -1.0)}, {"cap_s": 0}])
def test_impossible_durations_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least median_s|remove it|greater than 0"):
        DurationsConfig.model_validate(settings)


def test_an_attempt_takes_the_same_time_in_every_run_and_its_turns_add_up() -> None:
    agent = SimulatedAgent(SimulatedAgentConfig(durations=SWE, turns=7, seed=1))
    again = SimulatedAgent(SimulatedAgentConfig(durations=SWE, turns=7, seed=1))
    keys = [f"task g{group}-0 {attempt}" for group in range(20) for attempt in (1, 2)]
    assert [agent.turns_s(key) for key in keys] == [again.turns_s(key) for key in reversed(keys)][::-1]
    sums = [sum(agent.turns_s(key)) for key in keys]
    assert np.allclose(sums, [Durations(SWE, seed=1).draw_s(key) for key in keys])
    assert len(set(sums)) == len(keys)


def test_a_session_has_one_row_with_only_sampled_tokens_trained() -> None:
    async def main() -> None:
        engine = SimulatedEngine()
        engine.set_served(served(1, 3))
        session = SimulatedSession(key="k", engine=engine, temperature=1.0)
        assert session.report(SessionId("s")).trajectory is None
        await session.turn(4, 1.0)
        engine.set_served(served(2, 4))
        await session.turn(4, 1.0)
        report = session.report(SessionId("s"))
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        assert report.sampled_tokens == report.trained_tokens == int(row.loss_mask_T.sum()) == 8
        assert [(span.end - span.start, span.version.step) for span in row.versions] == [(4, 3), (4, 4)]
        assert all(row.loss_mask_T[span.start : span.end].all() for span in row.versions)
        assert not row.logprobs_T[~row.loss_mask_T].any()

    run_virtual(main())


def test_rewards_follow_the_difficulty_of_the_task_and_repeat() -> None:
    async def main() -> None:
        sandbox = SandboxRef(provider="simulated", id=SandboxId("s"), endpoint="", secret="")
        for task in simulated_tasks(0, 3, evaluate_s=2.0):
            requests = [EvaluationRequest(key=f"r{n}.1", task_id=task.id, sandbox=sandbox) for n in range(400)]
            began_s = asyncio.get_running_loop().time()
            score = partial(simulated_verdict, task.evaluator, task)
            rewards = [verdict.reward for verdict in await asyncio.gather(*map(score, requests))]
            assert asyncio.get_running_loop().time() == began_s + 2.0
            assert rewards == [verdict.reward for verdict in await asyncio.gather(*map(score, requests))]
            chance = task.evaluator.verdict.success
            assert abs(fmean(reward or 0.0 for reward in rewards) - chance) < 0.1

    run_virtual(main())


def test_held_out_and_training_tasks_are_disjoint() -> None:
    training = simulated_tasks(0, 2048, evaluate_s=0.0)
    held_out = simulated_tasks(0, 2048, evaluate_s=0.0, family="heldout")
    problems = {task.id: problem_digest(task) for task in held_out}
    refuse_overlap({problem_digest(task) for task in training}, problems, "tasks")
    assert {task.id for task in training}.isdisjoint(task.id for task in held_out)
