"""Whether a run makes progress, by what its parts report."""

from __future__ import annotations

import pytest

from headrace.actors.run.progress_signs import MAX_EXCUSED_TIMEOUTS, MAX_FRUITLESS_EPOCHS, ProgressSigns, StallDetector
from headrace.buffer.trajectories.versions import PolicyVersion

STALL_S = 10.0


def signs(
    *, under_way: dict[str, float] | None = None, version: tuple[int, int] | None = None, **counts: int
) -> ProgressSigns:
    return ProgressSigns(
        counts=counts, under_way=under_way or {}, version=None if version is None else PolicyVersion(*version)
    )


@pytest.mark.parametrize("name", ["steps", "stages", "turns", "tokens", "answers", "judged_steps"])
def test_an_increase_of_any_count_is_progress(name: str) -> None:
    detector = StallDetector(0.0, STALL_S)
    assert {detector.stalled(float(second), signs(**{name: second}, still=3)) for second in range(1, 50)} == {None}


@pytest.mark.parametrize(
    "still",
    [
        lambda _: signs(steps=3, tokens=7, scored=5),
        lambda second: signs(steps=1) if second % 2 else signs(),
        lambda second: signs(steps=1, **({"scored": 3} if second % 3 else {})),
        lambda _: signs(),
    ],
    ids=["still", "learner that dies again and again", "dispatcher that dies again and again", "nobody answers"],
)
def test_a_run_without_progress_is_ended(still) -> None:
    detector = StallDetector(0.0, STALL_S)
    reasons = [detector.stalled(float(second), still(second)) for second in range(1, 30)]
    assert reasons[0] is None
    assert reasons[-1] is not None
    assert reasons[-1].startswith("no progress for 10 s (service.stall_s)")


def watched(result_s: float, *, scored_every: int | None) -> list[str | None]:
    """Turns go on for ever; a rollout is scored every so many seconds."""
    detector = StallDetector(0.0, STALL_S, result_s)
    told = []
    for second in range(1, 200):
        counts = {"turns": second, "scored": second // scored_every if scored_every else 0}
        told.append(detector.stalled(float(second), ProgressSigns(counts=counts, intermediate={"turns"})))
    return told


def test_turns_without_results_stop_counting_as_progress() -> None:
    """Rollouts that fail after their turns are issued again and again, as long as nobody is charged with them."""
    told = watched(60.0, scored_every=None)
    assert set(told[: 60 + int(STALL_S)]) == {None}
    reason = told[60 + int(STALL_S)]
    assert reason is not None
    assert reason.startswith(
        "no rollout has had a result for 71 s, and turns alone have not counted as progress for 10 s"
    )


def test_endless_boots_delay_a_stall_only_up_to_their_limit() -> None:
    detector = StallDetector(0.0, STALL_S, 60.0)
    working = [
        detector.stalled(
            float(second), ProgressSigns(counts={"turns": second}, intermediate={"turns"}, under_way={"boots": 5.0})
        )
        for second in range(1, 200)
    ]
    assert None in working
    assert working[-1] is not None


def test_a_long_start_of_an_engine_leaves_time_for_a_result() -> None:
    detector = StallDetector(0.0, STALL_S, 60.0)
    for second in range(1, 100):
        assert detector.stalled(float(second), ProgressSigns(under_way={"engine start": 300.0})) is None
    told = {
        detector.stalled(float(second), ProgressSigns(counts={"turns": second}, intermediate={"turns"}))
        for second in range(100, 150)
    }
    assert told == {None}


def test_turns_are_progress_while_results_arrive() -> None:
    assert set(watched(60.0, scored_every=59)) == {None}


def test_the_reason_names_the_last_progress_of_each_count() -> None:
    detector = StallDetector(0.0, STALL_S)
    detector.stalled(1.0, signs(turns=1))
    detector.stalled(4.0, signs(turns=1, steps=1))
    reason = detector.stalled(20.0, signs(turns=1, steps=1))
    assert reason is not None
    assert reason.endswith("last progress: steps 16 s ago, turns 19 s ago")


def test_a_count_that_restarts_from_a_lower_value_continues_from_there() -> None:
    detector = StallDetector(0.0, STALL_S)
    assert detector.stalled(1.0, signs(scored=100)) is None
    assert detector.stalled(9.0, signs(scored=0)) is None
    assert detector.stalled(10.0, signs(scored=1)) is None
    assert detector.stalled(19.0, signs(scored=1)) is None


def test_work_in_progress_delays_a_stall() -> None:
    """A boot that takes longer than a run may stand still is no stall, and neither is a stage of the learner."""
    detector = StallDetector(0.0, STALL_S)
    detector.stalled(0.0, signs(turns=1))
    assert detector.stalled(60.0, signs(turns=1, under_way={"boots": 30.0})) is None
    assert detector.stalled(61.0, signs(turns=1)) is None, "what was waited for has only just ended"
    assert detector.stalled(60.0 + STALL_S + 1, signs(turns=1)) is not None


def test_repeated_work_delays_a_stall_only_up_to_its_limit() -> None:
    detector = StallDetector(0.0, STALL_S)
    under_way = {"engine start": 20.0, "boots": 5.0}
    ends_s = STALL_S + MAX_EXCUSED_TIMEOUTS * 20.0
    assert detector.stalled(ends_s, signs(under_way=under_way)) is None
    assert detector.stalled(ends_s + 1, signs(under_way=under_way)) is not None


def test_a_warning_is_given_once_at_half_the_stall_time() -> None:
    detector = StallDetector(0.0, STALL_S)
    warned = {}
    for second in range(1, 30):
        assert detector.stalled(float(second), signs(turns=1 if second < 20 else 2)) is None or second in range(12, 20)
        if (warning := detector.warning(float(second))) is not None:
            warned[second] = warning
    assert list(warned) == [7, 26]
    assert warned[7] == "no progress for 6 s; last progress: turns 6 s ago"


def test_learners_that_die_at_the_same_step_end_the_run() -> None:
    detector = StallDetector(0.0, STALL_S)
    assert detector.stalled(0.0, signs(version=(1, 5))) is None
    for epoch in range(2, MAX_FRUITLESS_EPOCHS + 2):
        assert detector.stalled(0.0, signs(version=(epoch, 4), scored=epoch)) is None
        assert detector.stalled(0.0, signs(version=(epoch, 5), scored=epoch)) is None
    reason = detector.stalled(0.0, signs(version=(MAX_FRUITLESS_EPOCHS + 2, 4)))
    assert reason == f"{MAX_FRUITLESS_EPOCHS} learners died before they finished step 6"
