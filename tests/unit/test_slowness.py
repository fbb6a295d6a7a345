"""Verdicts on generated rows: what is typical, slow, the cause, the factor and the cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.actors.telemetry.slow import meanwhile
from headrace.actors.telemetry.slow.cohort import Cohorts, Typical
from headrace.actors.telemetry.slow.factors import discovery_limit, upper_tail
from headrace.actors.telemetry.slow.rows import RUNNING, Interval, RolloutTime, RunTimes, StepTime
from headrace.actors.telemetry.slow.survival import SurvivalCurve
from headrace.actors.telemetry.slow.verdicts import explain
from support.slow_rows import STEP_S, many, only, row


def slow_host(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    if labels["host"] == "host-1":
        parts["tool.bash"] *= 6


def slow_image(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    if labels["image"] == "image-2":
        parts["boot"] += 60


def slow_engine(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    if labels["engines"] == ("engine-3",):
        parts["engine.decode"] *= 4


def slow_tool(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    if labels["task"] == "task-4":
        parts["tool.bash"] += 60


def retried_boot(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    if int(at_s * 1000) % 17 == 0:
        labels["boot_tries"] = 3.0
        parts["boot"] += 60


EVALUATIONS = tuple(Interval("evaluation", 1000.0 + STEP_S * step, 1020.0 + STEP_S * step) for step in range(0, 40, 10))


def evaluated(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    if any(each.start_s <= at_s <= each.end_s for each in EVALUATIONS):
        parts["boot"] += 60


@pytest.mark.parametrize(
    ("change", "part", "factor"),
    [
        (slow_host, "tool.bash", "host host-1"),
        (slow_image, "boot", "image image-2"),
        (slow_engine, "engine.decode", "engines engine-3"),
        (slow_tool, "tool.bash", "task task-4"),
        (retried_boot, "boot", "boot_tries above 1"),
        (evaluated, "boot", "evaluation"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_planted_cause_is_named_with_its_factor(change: Any, part: str, factor: str, seed: int) -> None:
    report = explain(RunTimes(rows=tuple(many(seed, change)), meanwhile=EVALUATIONS))
    assert only(report) == (part, factor)


def test_runs_without_a_cause_have_no_common_factor() -> None:
    found = [explain(RunTimes(rows=tuple(many(1000 + seed)), meanwhile=EVALUATIONS)).causes for seed in range(60)]
    assert sum(bool(causes) for causes in found) > 45  # some rollouts are slow by chance
    assert sum(any(cause.factor for cause in causes) for causes in found) <= 2


def test_a_rollout_is_not_in_its_own_cohort() -> None:
    rows = [row(number, {"own": 10.0 if number else 1000.0}) for number in range(9)]
    medians, highs, counts = Cohorts(rows).limits()
    assert (medians[0], highs[0], counts[0]) == (10.0, 10.0, 8)
    assert highs[1] > 10.0
    assert Cohorts(rows).typical_parts(0)["own"] == Typical(10.0, 10.0, 8)


@pytest.mark.parametrize("count", [2, 5, 9, 30])
def test_limits_equal_those_of_the_others_computed_one_by_one(count: int) -> None:
    values = np.random.default_rng(count).lognormal(3, 1, count)
    medians, highs, _ = Cohorts([row(number, {"own": float(value)}) for number, value in enumerate(values)]).limits()
    for place in range(count):
        others = np.delete(values, place)
        if len(others) >= 8:
            assert medians[place] == pytest.approx(np.median(others))
            assert highs[place] == pytest.approx(np.quantile(others, 0.95))


def test_a_small_cohort_borrows_from_the_recipe() -> None:
    rows = [row(number, {"own": 30.0}, task="rare") for number in range(3)]
    rows += [row(8 + number, {"own": 10.0}, task=f"task-{number % 4}") for number in range(40)]
    # Two others: a quarter of the weight. The recipe has all other rollouts, the rare ones included.
    cohorts = Cohorts(rows)
    medians, _, counts = cohorts.limits()
    assert (medians[0], counts[0]) == (pytest.approx(0.25 * 30 + 0.75 * 10), 2)
    assert cohorts.typical_parts(0)["own"].p50_s == pytest.approx(0.25 * 30 + 0.75 * 10)


def test_far_versions_are_not_in_the_cohort() -> None:
    rows = [row(number, {"own": 10.0 if number < 10 else 40.0}, step=0 if number < 10 else 100) for number in range(20)]
    medians, highs, counts = Cohorts(rows).limits()
    assert (highs[0], medians[15], counts[0]) == (10.0, 40.0, 9)


def test_rollouts_that_still_run_are_censored() -> None:
    ended = [row(number, {"own": 10.0 + number}) for number in range(10)]
    running = [
        row(10 + number, {RUNNING: 100.0}, ended_at_s=None, ready_at_s=None, finished=False) for number in range(6)
    ]
    without = Cohorts(ended).limits()[0][0]
    assert Cohorts([*ended, *running]).limits()[0][0] > without
    # One that has run for a moment says nothing.
    fresh = [row(10 + n, {RUNNING: 0.1}, ended_at_s=None, ready_at_s=None, finished=False) for n in range(6)]
    assert Cohorts([*ended, *fresh]).limits()[0][0] == pytest.approx(without, abs=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_limits_with_censored_members_are_those_of_the_survival_curve_without_the_rollout(seed: int) -> None:
    generator = np.random.default_rng(seed)
    seconds = generator.lognormal(3, 1, 30).round()  # with ties
    ended = generator.random(30) < 0.7
    ended[:2] = True
    rows = [
        row(number, {"own": float(value)}, finished=bool(done))
        for number, (value, done) in enumerate(zip(seconds, ended, strict=True))
    ]
    medians, highs, _ = Cohorts(rows).limits()
    for place in range(30):
        others = np.delete(np.arange(30), place)
        curve = SurvivalCurve.estimate(seconds[others].tolist(), ended[others].tolist())
        assert (medians[place], highs[place]) == (curve.quantile_s(0.5), curve.quantile_s(0.95))


@pytest.mark.parametrize("seed", range(5))
def test_typical_parts_equal_those_of_the_others_computed_one_by_one(seed: int) -> None:
    rows = many(seed, slow_host)
    rows[5] = replace(rows[5], finished=False)
    cohorts = Cohorts(rows)
    places = np.arange(0, 640, 7)
    quantiles, counts = cohorts.part_quantiles(places, (0.5, 0.9))
    columns = [cohorts.column[part] for part in ("tool.bash", "own")]
    for number, place in enumerate(places.tolist()):
        others = [
            one
            for at, one in enumerate(rows)
            if at != place and one.finished and one.task == rows[place].task and abs(one.step - rows[place].step) <= 10
        ]
        assert counts[number] == len(others) >= 8
        for column, part in zip(columns, ("tool.bash", "own"), strict=True):
            expected = np.quantile([one.parts_s[part] for one in others], (0.5, 0.9))
            assert quantiles[number, :, column] == pytest.approx(expected)


def test_a_rollout_that_runs_beyond_the_limit_is_slow() -> None:
    rows = [row(number, {"own": 10.0}) for number in range(12)]
    rows.append(row(12, {RUNNING: 50.0}, ended_at_s=None, ready_at_s=None, finished=False))
    (verdict,) = explain(RunTimes(rows=tuple(rows))).verdicts
    assert (verdict.running, verdict.part, verdict.excess_s, verdict.cost_s) == (True, RUNNING, 40.0, 0.0)


def test_two_parts_are_named_if_none_has_half_of_the_excess() -> None:
    usual = {"boot": 5.0, "own": 5.0, "offer": 5.0}
    rows = [row(number, usual) for number in range(12)]
    rows.append(row(12, {"boot": 45.0, "own": 35.0, "offer": 25.0}))
    (verdict,) = explain(RunTimes(rows=tuple(rows))).verdicts
    assert verdict.causes == ("boot", "own")
    rows[-1] = row(12, {"boot": 45.0, "own": 15.0, "offer": 15.0})
    (verdict,) = explain(RunTimes(rows=tuple(rows))).verdicts
    assert verdict.causes == ("boot",)


def test_within_the_limits_nothing_is_slow() -> None:
    rows = [row(number, {"own": 10.0}) for number in range(12)]
    assert explain(RunTimes(rows=(*rows, row(12, {"own": 14.9})))).verdicts == ()
    assert explain(RunTimes(rows=())).verdicts == ()


def test_a_step_is_delayed_only_by_the_member_without_which_its_batch_was_full() -> None:
    rows = [row(number, {"own": 10.0}) for number in range(16)]
    late = row(16, {"own": 100.0})
    names = tuple(one.rollout_id for one in (*rows[:7], late))

    def cost(free_at_s: float, *others: RolloutTime) -> float:
        members = (*names, *(one.rollout_id for one in others))
        step = StepTime(step=1, rollouts=members, leased_at_s=1100.0, committed_at_s=1200.0, free_at_s=free_at_s)
        report = explain(RunTimes(rows=(*rows, late, *others), steps=(step,)))
        return next(one.cost_s for one in report.verdicts if one.rollout_id == late.rollout_id)

    assert cost(0.0) == 90.0  # the others were there after 10 s
    assert cost(1060.0) == 40.0  # the learner was busy until then
    assert cost(1150.0) == 0.0
    other = replace(row(24, {"own": 10.0}), ready_at_s=1095.0)
    assert cost(0.0, other) == 5.0  # another group was sealed then
    assert cost(0.0, replace(other, ready_at_s=1200.0)) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_of_a_verdict_add_up_to_its_total(seed: int) -> None:
    for verdict in explain(RunTimes(rows=tuple(many(seed, slow_host)))).verdicts:
        assert sum(part.seconds for part in verdict.parts) == pytest.approx(verdict.total_s)
        assert all(part.excess_s >= 0 for part in verdict.parts)


def test_the_exact_test_equals_counting() -> None:
    # 3 of 5 marked among 10, 4 drawn: C(5,3) C(5,1) + C(5,4) of C(10,4).
    assert upper_tail(10, 5, 4, 3) == pytest.approx((10 * 5 + 5) / 210)
    assert upper_tail(10, 5, 4, 0) == pytest.approx(1.0)


def test_clocks_that_disagree_are_reported() -> None:
    rows = [row(number, {"own": 10.0}) for number in range(12)]
    rows[3] = replace(rows[3], clock_s=7.5, labels={"node": "node-b"})
    (line,) = explain(RunTimes(rows=tuple(rows))).missing
    assert "7.5 s" in line and "node-b" in line


def test_pushes_that_all_rollouts_meet_are_named_by_their_seconds() -> None:
    pushes = [Interval("push", 1000.0 + 15 * number, 1000.0 + 15 * number + 1) for number in range(170)]
    pushes += [Interval("push", 1200.0 + 400 * number, 1260.0 + 400 * number) for number in range(6)]

    def gated(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        agent_s = at_s + parts["boot"] + parts["prepare"]
        for push in pushes:
            if push.start_s < agent_s + 30.0 and push.end_s > agent_s:
                parts["gate"] = parts.get("gate", 0.0) + push.end_s - max(agent_s, push.start_s)

    report = explain(RunTimes(rows=tuple(many(7, gated)), meanwhile=tuple(pushes)))
    assert only(report) == ("gate", "push")
    # The labels of the run do not matter, and neither does a kind of event that is always there.
    always = (*pushes, Interval("evaluation", 0.0, 1e9))
    assert only(explain(RunTimes(rows=tuple(many(7, gated)), meanwhile=always))) == ("gate", "push")


def test_stragglers_are_not_explained_by_the_events_that_they_meet_because_they_are_long() -> None:
    pushes = tuple(Interval("push", 1000.0 + 150 * number, 1002.0 + 150 * number) for number in range(40))

    def straggling(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        if int(at_s * 1000) % 10 == 0:
            parts["engine.decode"] *= 5
            parts["tool.bash"] *= 5

    causes = explain(RunTimes(rows=tuple(many(3, straggling)), meanwhile=pushes)).causes
    assert causes
    assert {cause.factor for cause in causes} == {None}


def test_a_factor_of_half_of_all_rollouts_is_found() -> None:
    def halved(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["node"] = "a" if int(labels["host"][-1]) < 2 else "b"
        if labels["node"] == "a" and int(at_s * 1000) % 4 == 0:
            parts["boot"] += 60

    assert only(explain(RunTimes(rows=tuple(many(5, halved))))) == ("boot", "node a")


def test_labels_that_the_same_rollouts_have_are_named_together() -> None:
    def alias(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["node"] = f"node-{labels['host'][-1]}"
        slow_host(labels, parts, at_s)

    (factor, *_) = [cause.factor for cause in explain(RunTimes(rows=tuple(many(1, alias)))).causes if cause.factor]
    assert (factor.text(), factor.same) == ("host host-1", ("node node-1",))


def test_a_factor_shows_the_slow_rollouts_that_their_own_p95_hides() -> None:
    report = explain(RunTimes(rows=tuple(many(2, retried_boot))))
    hidden = [verdict for verdict in report.verdicts if verdict.against == "factor"]
    assert hidden
    assert all(verdict.total_s <= verdict.p95_s and verdict.total_s > 1.5 * verdict.p50_s for verdict in hidden)
    assert {verdict.part for verdict in hidden} == {"boot"}


def test_a_task_that_takes_a_little_longer_in_several_parts_is_slow_as_a_whole() -> None:
    def slower(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        if labels["task"] == "task-4":
            parts["boot"] += 16
            parts["evaluate.check"] += 15

    verdicts = explain(RunTimes(rows=tuple(many(6, slower)))).verdicts
    whole = [verdict for verdict in verdicts if verdict.against == "tasks"]
    assert {verdict.task for verdict in whole} == {"task-4"}
    named = [verdict for verdict in whole if verdict.part in ("boot", "evaluate.check")]
    assert len(named) > max(32, 0.8 * len(whole)), "the others decoded for long by chance"
    assert {verdict.factor.text() if verdict.factor else "" for verdict in named} == {"task task-4"}


def test_a_group_that_met_a_bad_moment_says_nothing_of_its_task() -> None:
    def found(*groups: int) -> tuple[str, str | None]:
        rows = many(5)
        for place in (place for group in groups for place in range(8 * group, 8 * group + 8)):
            parts = rows[place].parts_s | {"boot": 600.0}
            rows[place] = replace(rows[place], parts_s=parts, total_s=sum(parts.values()))
        return only(explain(RunTimes(rows=tuple(rows))))

    assert found(14) == ("boot", None)
    part, factor = found(14, 24)
    assert (part, str(factor).startswith("task task-4 ")) == ("boot", True), "with the time of both"


@pytest.mark.parametrize(("hosts", "factor"), [(1, None), (2, "failed_on host-0")])
def test_the_only_host_does_not_explain_why_attempts_failed(hosts: int, factor: str | None) -> None:
    def failed(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["host"] = f"host-{int(at_s) % hosts}"
        if int(at_s * 1000) % 17 == 0:
            labels["failed_on"] = ("host-0",)
            parts["earlier_attempts"] = 200.0

    assert only(explain(RunTimes(rows=tuple(many(7, failed))))) == ("earlier_attempts", factor)


def test_a_label_with_a_value_for_each_rollout_is_no_factor() -> None:
    def unique(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["session"] = f"session-{at_s}"
        slow_engine(labels, parts, at_s)

    assert only(explain(RunTimes(rows=tuple(many(1, unique))))) == ("engine.decode", "engines engine-3")


def test_tests_that_cannot_succeed_are_not_counted() -> None:
    # 0.01 / (1 + 1/2) / 2 for two tests; the other ninety cannot have a probability below 0.5.
    assert discovery_limit([0.003], [1e-6, 1e-6, *[0.5] * 90]) == 0.003
    assert discovery_limit([0.004], [1e-6, 1e-6, *[0.5] * 90]) == -1.0
    assert discovery_limit([0.003], [1e-6] * 92) == -1.0
    assert discovery_limit([], []) == -1.0


@pytest.mark.parametrize("block_bytes", [1, 64, 4 << 20])
def test_records_without_their_numbers_are_left_out(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meanwhile, "BLOCK_BYTES", block_bytes)
    good = [
        {"kind": "push", "time_s": 5.0, "total_s": 1.0},
        {"kind": "stations", "time_s": 9, "rollout_limit": 8, "seconds": 2},
    ]
    bad = [b"[]", b'{"kind":"push"}', b'{"kind":"push","time_s":5.0,"total_s":null}', b"\xff\x00"]
    bad += [b'{"kind":["push"],"rollout_limit":1}', b'{"kind":"push","time_s":"now","total_s":1}']
    bad += [b'{"kind":"push","time_s":1,"tot']
    path = tmp_path / "metrics.jsonl"
    lines = [*bad, *map(orjson.dumps, good), *bad, b'{"kind":"step"}', orjson.dumps(good[0])]
    # The last line has no end yet.
    path.write_bytes(b"\n".join(lines))
    assert list(meanwhile.pushes_and_limits(path)) == [*good, good[0]]
