"""The bench of verdicts: its runs have the cause that they say, and its scores count what was named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from benches.verdicts.planted import CAUSES, Cause, planted_run
from benches.verdicts.scores import RunScore, summarize
from benches.verdicts.truth import affected_rollouts
from benches.verdicts.verdict_bench import judge_run

from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.audit.evidence import read_evidence

pytestmark = pytest.mark.whole


def test_a_run_follows_from_its_seed_and_cause() -> None:
    for cause in Cause:
        assert planted_run(3, cause) == planted_run(3, cause) != planted_run(4, cause)
        assert bool(planted_run(3, cause).parts) == bool(planted_run(3, cause).factors) == (cause is not Cause.NONE)
    assert len(CAUSES) == 10


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
