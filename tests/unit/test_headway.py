"""Whether a run gets anywhere, by what its parts say."""

from __future__ import annotations

import pytest

from headrace.actors.dispatcher import DispatcherStatus
from headrace.actors.headway import MAX_FRUITLESS_EPOCHS, Headway
from headrace.actors.learner import LearnerStatus
from headrace.buffer.versions import PolicyVersion

STALL_S = 10.0


def learner(*, epoch: int = 1, step: int = 0, tokens: int = 0) -> LearnerStatus:
    return LearnerStatus(version=PolicyVersion(epoch, step), last=None, idle_share=0.0, tokens=tokens, process_id=1)


def dispatcher(*, finished: int = 0, scored: int = 0, answered: int = 0) -> DispatcherStatus:
    return DispatcherStatus(
        in_flight=4,
        evaluating=0,
        finished=finished,
        scored=scored,
        answered=answered,
        infra=finished - scored,
        mean_reward=None,
    )


@pytest.mark.parametrize(
    "moving",
    [
        lambda second: (learner(step=second), None),
        lambda second: (learner(tokens=second), dispatcher()),
        lambda second: (None, dispatcher(finished=second, scored=second)),
        lambda second: (None, dispatcher(answered=second)),
    ],
)
def test_a_run_that_gets_somewhere_is_left_alone(moving) -> None:
    headway = Headway(0.0, STALL_S)
    assert [headway.stalled(float(second), *moving(second)) for second in range(1, 50)] == [None] * 49


@pytest.mark.parametrize(
    "still",
    [
        lambda _: (learner(step=3, tokens=7), dispatcher(scored=5)),
        lambda second: (learner() if second % 2 else None, None),
        lambda second: (None, dispatcher(finished=second)),
        lambda second: (learner(), dispatcher() if second % 3 else None),
    ],
    ids=["still", "learner that dies again and again", "only failures", "dispatcher that dies again and again"],
)
def test_a_run_that_gets_nowhere_ends(still) -> None:
    headway = Headway(0.0, STALL_S)
    reasons = [headway.stalled(float(second), *still(second)) for second in range(1, 30)]
    assert reasons[0] is None
    assert reasons[-1] == "nothing moved for 10 s (service.stall_s)"


def test_a_part_that_comes_back_lower_counts_from_there() -> None:
    headway = Headway(0.0, STALL_S)
    assert headway.stalled(1.0, None, dispatcher(scored=100)) is None
    assert headway.stalled(9.0, None, dispatcher(scored=0)) is None
    assert headway.stalled(10.0, None, dispatcher(scored=1)) is None
    assert headway.stalled(19.0, None, dispatcher(scored=1)) is None


def test_learners_that_die_at_the_same_step_end_the_run() -> None:
    headway = Headway(0.0, STALL_S)
    assert headway.stalled(0.0, learner(epoch=1, step=5), None) is None
    for epoch in range(2, MAX_FRUITLESS_EPOCHS + 2):
        assert headway.stalled(0.0, learner(epoch=epoch, step=4), dispatcher(scored=epoch)) is None
        assert headway.stalled(0.0, learner(epoch=epoch, step=5), dispatcher(scored=epoch)) is None
    reason = headway.stalled(0.0, learner(epoch=MAX_FRUITLESS_EPOCHS + 2, step=4), None)
    assert reason == f"{MAX_FRUITLESS_EPOCHS} learners died before step 6 was done"
