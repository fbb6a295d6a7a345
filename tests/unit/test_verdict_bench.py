"""The bench of verdicts: its runs have the cause that they say, and its scores count what was named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from benches.verdicts.moments import MOMENTS, plant_moment
from benches.verdicts.planted import CAUSES, STEPS_OF_MOMENTS, Cause, planted_run
from benches.verdicts.scores import RunScore, summarize
from benches.verdicts.truth import affected_rollouts
from benches.verdicts.verdict_bench import judge_run, score_of

from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.telemetry.slow.factors import LEAST_SUPPORT
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.rows import RunTimes
from headrace.actors.telemetry.slow.verdicts import explain
from headrace.buffer.audit.evidence import read_evidence

pytestmark = pytest.mark.whole


def test_a_run_follows_from_its_seed_and_cause() -> None:
    for cause in Cause:
        assert planted_run(3, cause) == planted_run(3, cause) != planted_run(4, cause)
        is_simulated = cause is not Cause.NONE and cause not in MOMENTS
        assert bool(planted_run(3, cause).parts) == bool(planted_run(3, cause).factors) == is_simulated
    assert len(CAUSES) == 18


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> RunTimes:
    folder = tmp_path_factory.mktemp("free") / "run"
    run_plan(planted_run(1, Cause.NONE, steps=STEPS_OF_MOMENTS).plan, folder)
    return read_times(folder)


@pytest.mark.parametrize("cause", list(MOMENTS))
def test_a_cause_in_time_changes_the_affected_rollouts_only_and_is_named(cause: Cause, times: RunTimes) -> None:
    plant = plant_moment(times, cause, 1, 0)
    before = {row.rollout_id: row for row in times.rows}
    longer_s = {row.rollout_id: row.total_s - before[row.rollout_id].total_s for row in plant.times.rows}
    assert LEAST_SUPPORT <= len(plant.affected) < len(times.rows)
    assert min(longer_s.values()) == 0.0
    for row in plant.times.rows:
        assert sum(row.parts_s.values()) == pytest.approx(row.total_s)
        changed = {part for part in row.parts_s if row.parts_s[part] != before[row.rollout_id].parts_s.get(part)}
        assert changed == ({plant.part} if longer_s[row.rollout_id] else set())
    score = score_of(1, cause, plant, plant.affected, explain(plant.times))
    assert score.explains_part
    assert score.explains_factor
    assert not [text for text, planted in score.factors if not planted]


@pytest.mark.parametrize("cause", [Cause.EVALUATOR, Cause.EVALUATION])
def test_the_cause_makes_the_affected_rollouts_longer_and_only_some_are_affected(cause: Cause, tmp_path: Path) -> None:
    planted = planted_run(1, cause)
    run_plan(planted.plan, tmp_path / "run")
    evidence = read_evidence(tmp_path / "run")
    affected = affected_rollouts(planted, evidence)
    wall_s: dict[bool, list[float]] = {True: [], False: []}
    for attempt in evidence.attempts:
        if attempt.reward is not None and attempt.breakdown is not None:
            wall_s[attempt.rollout_id in affected].append(attempt.breakdown.wall_s)
    assert 5 <= len(wall_s[True]) < len(wall_s[False])
    assert median(wall_s[True]) > 1.25 * median(wall_s[False])


def test_a_run_without_a_cause_has_no_affected_rollout(tmp_path: Path) -> None:
    planted = planted_run(1, Cause.NONE)
    run_plan(planted.plan, tmp_path / "run")
    assert not affected_rollouts(planted, read_evidence(tmp_path / "run"))


def test_verdicts_of_planted_runs_are_scored_against_their_causes() -> None:
    slow = judge_run(1, Cause.ENGINE)["verdicts"]
    assert 0 < slow.called_slow <= min(slow.affected, slow.slow) < slow.rollouts
    assert slow.explains_part
    assert slow.explains_factor
    free = judge_run(1, Cause.NONE)["verdicts"]
    assert (free.affected, free.called_slow, free.named) == (0, 0, 0)
    assert free.slow > 0


def score(
    cause: Cause, *, called_slow: int = 0, named: int = 0, factors: tuple[tuple[str, bool], ...] = ()
) -> RunScore:
    return RunScore(
        seed=0,
        cause=cause,
        rollouts=300,
        slow=20,
        affected=10,
        called_slow=called_slow,
        named=named,
        wrong_parts=Counter({"own": called_slow - named}),
        factors=factors,
    )


def test_scores_count_named_parts_and_factors_and_missed_runs() -> None:
    scores = [
        score(Cause.HOST, called_slow=8, named=6, factors=(("host host-1", True), ("image image-0", False))),
        score(Cause.HOST, called_slow=8, named=4),
        score(Cause.GATE),
        score(Cause.NONE, factors=(("task t", False),)),
        score(Cause.NONE),
    ]
    figures = summarize(scores)
    assert figures["phase_recall"] == pytest.approx(1 / 3)
    assert figures["phase_recall_of_rollouts"] == pytest.approx(10 / 16)
    assert figures["factor_recall"] == pytest.approx(1 / 3)
    assert figures["false_factors"] == 0.5
    assert figures["causes"]["host"]["wrong_factors"] == {"image image-0": 1}
    assert figures["causes"]["gate"]["without_slow"] == 1
