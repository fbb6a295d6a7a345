"""Verdicts on causes that lie in time: windows, levels, events that occurred once, and what only looks like a cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.actors.telemetry.slow.advice import BY_STAGE, RELIEF
from headrace.actors.telemetry.slow.cohort import Cohorts
from headrace.actors.telemetry.slow.findings import compared_tasks
from headrace.actors.telemetry.slow.moments import common_time, level, time_text
from headrace.actors.telemetry.slow.rows import Interval, RunTimes
from headrace.actors.telemetry.slow.terminal_text import slow_lines
from headrace.actors.telemetry.slow.verdicts import SlowReport, explain
from support.slow_rows import STEP_S, many, only

Change = Callable[[dict[str, Any], dict[str, float], float], None]
WINDOW_S = (1800.0, 2400.0)
STOP_S = (2000.0, 2060.0)
PUSHES = tuple(Interval("push", 1000.0 + 55 * number, 1004.0 + 55 * number) for number in range(44))
EVALUATIONS = tuple(Interval("evaluation", at_s, at_s + 40.0) for at_s in (1150.0, 2010.0, 2900.0))


def explained(seed: int, change: Change, *, meanwhile: tuple[Interval, ...] = ()) -> SlowReport:
    return explain(RunTimes(rows=tuple(many(seed, change)), meanwhile=meanwhile))


def factors(report: SlowReport) -> set[str]:
    return {cause.factor.kind for cause in report.causes if cause.factor is not None}


def agent_s(parts: dict[str, float], at_s: float) -> tuple[float, float]:
    """When the agent began and ended."""
    begin_s = at_s + parts["boot"] + parts["prepare"]
    return begin_s, begin_s + parts["engine.decode"] + parts["tool.bash"] + parts["own"]


def stopped(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
    begin_s, end_s = agent_s(parts, at_s)
    if begin_s < STOP_S[1] and end_s > STOP_S[0]:
        parts["other"] = STOP_S[1] - max(STOP_S[0], begin_s)


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_is_slow_for_a_while_is_named_with_the_time(seed: int) -> None:
    def slow_for_a_while(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        if labels["engines"] == ("engine-3",) and WINDOW_S[0] <= at_s < WINDOW_S[1]:
            parts["engine.decode"] += 60

    cause = explained(seed, slow_for_a_while).causes[0]
    assert cause.factor is not None
    assert (cause.part, cause.factor.kind, cause.factor.value) == ("engine.decode", "engines", "engine-3")
    assert cause.factor.begin_s == pytest.approx(WINDOW_S[0], abs=150)
    assert cause.factor.end_s == pytest.approx(WINDOW_S[1], abs=150)
    assert cause.factor.text() == f"engines engine-3 {time_text(cause.factor.begin_s, cause.factor.end_s)}"


@pytest.mark.parametrize("seed", range(6))
def test_one_bad_moment_is_a_window_and_neither_an_event_nor_a_task(seed: int) -> None:
    report = explained(seed, stopped, meanwhile=(*PUSHES, *EVALUATIONS))
    (cause,) = [cause for cause in report.causes if cause.factor is not None]
    assert cause.factor is not None
    assert (cause.part, cause.factor.kind) == ("other", "window")
    assert cause.factor.begin_s == pytest.approx(STOP_S[0], abs=40)
    assert cause.factor.end_s == pytest.approx(STOP_S[1], abs=40)
    assert cause.rollouts > 8


@pytest.mark.parametrize(("bad", "named"), [(EVALUATIONS[:1], False), (EVALUATIONS[:2], True), (EVALUATIONS, True)])
def test_an_event_is_a_factor_only_if_slow_rollouts_crowd_in_several_of_its_occurrences(
    bad: tuple[Interval, ...], named: bool
) -> None:
    def evaluated(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        if any(each.start_s - 60 <= at_s <= each.end_s for each in bad):
            parts["boot"] += 60

    assert ("evaluation" in factors(explained(2, evaluated, meanwhile=EVALUATIONS))) is named


@pytest.mark.parametrize("part", ["dispatch", "boot", "evaluate.check"])
def test_a_part_that_rose_for_good_is_named_with_its_time_and_its_rollouts_are_slow(part: str) -> None:
    def rose(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        parts[part] = parts.get(part, 0.02) + (30.0 if at_s >= 2000.0 else 0.0)

    report = explained(3, rose)
    cause = report.causes[0]
    assert cause.factor is not None
    assert (cause.part, cause.factor.kind, cause.factor.end_s) == (part, "after", None)
    assert cause.factor.begin_s == pytest.approx(2000.0, abs=STEP_S)
    late = [verdict for verdict in report.verdicts if verdict.against == "level"]
    assert len(late) > 200
    assert {verdict.part for verdict in late} == {part}


def test_slow_growth_and_a_spike_are_no_levels() -> None:
    at_s = np.linspace(0.0, 1000.0, 640)
    total_s = np.full(640, 40.0)
    generator = np.random.default_rng(5)
    noise = generator.uniform(0.0, 1.0, 640)
    assert level(at_s, noise + at_s / 10, total_s) is None
    assert level(at_s, noise + np.where((at_s > 400) & (at_s < 600), 50.0, 0.0), total_s) is None
    assert level(at_s, noise + np.where(at_s < 500, 50.0, 0.0), total_s) is None, "a fall is no cause"
    assert level(at_s[:20], np.where(at_s[:20] > 15, 50.0, 0.0), total_s[:20]) is None, "too few to tell"
    found = level(at_s, noise + np.where(at_s >= 500, 50.0, 0.0), total_s)
    assert found is not None
    assert found.begin_s == pytest.approx(500.0, abs=2.0)
    assert found.after_s - found.before_s == pytest.approx(50.0, abs=0.5)


def test_a_slow_gateway_is_named() -> None:
    def slow_gateway(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["gateway"] = f"gateway-{int(at_s * 1000) % 3}"
        parts["render"] = 40.0 if labels["gateway"] == "gateway-1" else 0.2

    assert only(explained(4, slow_gateway)) == ("render", "gateway gateway-1")


@pytest.mark.parametrize("images", [2, 5])
def test_an_image_that_is_slow_in_all_rollouts_of_its_tasks_is_compared_with_other_tasks(images: int) -> None:
    def slow_image(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["image"] = f"image-{int(labels['task'][-1]) % images}"
        if labels["image"] == "image-1":
            parts["boot"] += 60

    assert only(explained(5, slow_image)) == ("boot", "image image-1")


def test_an_image_is_compared_with_the_others_only_if_many_tasks_share_it() -> None:
    def compared(images: int) -> int:
        tasks = [np.array([number]) for number in range(640)]
        rows = [
            replace(row, labels={"image": f"image-{number % images}", "family": f"family-{number % 2}"})
            for number, row in enumerate(many(1))
        ]
        return sum(1 for _ in compared_tasks(Cohorts(rows), tasks)) - 1

    assert compared(4) == 4
    assert compared(16) == 16
    assert compared(640) == 0, "a set of tasks with an image each is compared once"


@pytest.mark.parametrize("waited_s", [0.0, 60.0])
def test_a_tool_that_waits_for_something_else_is_not_starved(waited_s: float) -> None:
    def waiting(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels |= {"cpu_s": parts["tool.bash"] / 2, "cpu_waited_s": 0.0}
        if labels["task"] == "task-4" and int(at_s * 1000) % 2:
            parts["tool.bash"] += 60
            labels["cpu_waited_s"] = waited_s

    report = explained(6, waiting)
    assert only(report) == ("tool.bash", "task task-4")
    assert "starved" not in factors(report), "it follows from the task"


def test_sandboxes_that_wait_for_a_cpu_are_starved() -> None:
    def starved(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["cpu_waited_s"] = 0.1
        if int(at_s * 1000) % 7 == 0:
            parts["tool.bash"] += 60
            labels["cpu_waited_s"] = 60.0

    assert only(explained(7, starved)) == ("tool.bash", "starved")


@pytest.mark.parametrize(("load", "advice"), [(0.5, BY_STAGE["boot"]), (6.0, RELIEF)])
def test_no_advice_adds_to_the_load_of_hosts_that_have_too_much(load: float, advice: str) -> None:
    def straggling(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        labels["load"] = load
        if int(at_s * 1000) % 40 == 0:
            parts["boot"] += 200

    assert {cause.advice for cause in explained(8, straggling).causes if cause.part == "boot"} == {advice}


def test_causes_with_a_factor_come_before_costlier_ones_without() -> None:
    def both(labels: dict[str, Any], parts: dict[str, float], at_s: float) -> None:
        if labels["host"] == "host-1":
            parts["tool.bash"] += 45
        if int(at_s * 1000) % 16 == 0:
            parts["own"] += 2000

    causes = explained(9, both).causes
    assert causes[0].factor is not None
    assert max(causes, key=lambda cause: cause.excess_s).factor is None


def test_the_first_line_says_how_many_slow_ones_fall_into_one_stretch() -> None:
    report = explained(1, stopped)
    assert report.crowd is not None
    assert report.crowd.rollouts >= 0.7 * sum(verdict.part == "other" for verdict in report.verdicts)
    assert STOP_S[0] - 40 <= report.crowd.begin_s <= report.crowd.end_s <= STOP_S[1] + 40
    first, second, *_ = slow_lines(report, report.verdicts, 3)
    assert first == f"{len(report.verdicts)} of 640 rollouts were slow"
    assert second.startswith(f"{report.crowd.rollouts} of all {len(report.verdicts)} slow ones fall into one stretch: ")
    assert explain(RunTimes(rows=())).crowd is None


def test_one_group_is_no_window() -> None:
    rows = many(5)
    for place in range(320, 328):
        parts = rows[place].parts_s | {"boot": 600.0}
        rows[place] = replace(rows[place], parts_s=parts, total_s=sum(parts.values()))
    assert factors(explain(RunTimes(rows=tuple(rows)))) == set()


def test_the_common_time_is_that_of_most() -> None:
    begin_s, end_s = np.array([0.0, 5.0, 6.0, 100.0]), np.array([10.0, 12.0, 8.0, 101.0])
    assert common_time(begin_s[:3], end_s[:3]) == (5.0, 10.0)
    assert common_time(begin_s, end_s) == (0.0, 101.0), "they follow each other"
    assert time_text(0.0, 86400.0) == "1970-01-01 00:00:00 to 1970-01-02 00:00:00 UTC"
