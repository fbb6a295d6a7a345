"""What the parts of a run report, as signs of progress."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.engines.registry import EngineState, Origin
from headrace.actors.rollouts.dispatcher import DispatcherStatus
from headrace.actors.rollouts.worker import WorkerStatus
from headrace.actors.run.progress_signs import WorkClocks, signs_of
from headrace.actors.run.supervision import StatusSnapshot
from headrace.actors.training.learner import LearnerStatus, Stage
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.serve.gateway.http.gateway import GatewayStats

LONGEST = WorkClocks(stage_s=1.0, engine_start_s=2.0, boot_s=3.0, push_s=4.0)


def snapshot(**parts: Any) -> StatusSnapshot:
    silent: dict[str, Any] = dict.fromkeys(("learner", "dispatcher", "pool", "gateway", "judged_steps"))
    return StatusSnapshot(**(silent | {"workers": (), "engines": ()} | parts))


def learner(stage: Stage = Stage.WAITING) -> LearnerStatus:
    return LearnerStatus(
        version=PolicyVersion(2, 7), last=None, idle_share=0.0, tokens=70, process_id=1, stage=stage, stages=9
    )


def gateway(*closed: str) -> GatewayStats:
    return GatewayStats(sessions=1, turns_in_flight={}, sampled_tokens=50, tokens_by_version={}, turns=5, closed=closed)


def test_unresponsive_actors_show_no_signs_of_progress() -> None:
    signs = signs_of(snapshot(), LONGEST)
    assert (signs.counts, signs.under_way, signs.version) == ({}, {}, None)


def test_all_counts_are_signs_of_progress() -> None:
    dispatcher = DispatcherStatus(
        in_flight=1, evaluating=1, finished=9, scored=3, answered=2, infra=6, mean_reward=None
    )
    worker = WorkerStatus(incarnation="x", assignment="y", running=1, phases={}, ended_turns=11)
    parts = {"learner": learner(), "dispatcher": dispatcher, "gateway": gateway(), "judged_steps": 4}
    signs = signs_of(snapshot(**parts, workers=(worker, None)), LONGEST)
    assert signs.version == PolicyVersion(2, 7)
    assert signs.counts == {
        "stages": 9,
        "trained tokens": 70,
        "steps": 7,
        "scored rollouts": 3,
        "answers": 2,
        "turns": 5,
        "sampled tokens": 50,
        "turns of worker 0": 11,
        "judged steps": 4,
    }
    assert set(signs.intermediate) == {"turns", "sampled tokens", "turns of worker 0", "judged steps"}


@pytest.mark.parametrize(
    ("parts", "under_way"),
    [
        ({"learner": learner()}, {}),
        ({"learner": learner(Stage.OPENING)}, {"learner opening": 1.0}),
        ({"learner": learner(Stage.STEPPING)}, {"learner stepping": 1.0}),
        ({"learner": learner(Stage.SAVING)}, {"learner saving": 1.0}),
        ({"learner": learner(Stage.PUSHING)}, {"push": 4.0}),
        ({"gateway": gateway("engine-1")}, {"push": 4.0}),
        ({"gateway": gateway()}, {}),
    ],
)
def test_work_in_progress_is_reported_with_its_timeout(parts: dict[str, Any], under_way: dict[str, float]) -> None:
    assert signs_of(snapshot(**parts), LONGEST).under_way == under_way


@pytest.mark.parametrize("state", EngineState)
def test_a_starting_engine_counts_as_work_in_progress(state: EngineState) -> None:
    engine = EngineStatus(
        engine_id=EngineId("e"), origin=Origin.LOCAL, place="0", state=state, url="http://e:1", version=None
    )
    wanted = {"engine start": 2.0} if state is EngineState.STARTING else {}
    assert signs_of(snapshot(engines=(engine,)), LONGEST).under_way == wanted
