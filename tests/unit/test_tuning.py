"""`headrace tune` in virtual time: records, candidates, search, choice, and what is written."""

from __future__ import annotations

import re
import shutil
import sqlite3
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.cli import app as cli
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.tuning.candidates import Candidate, Space, candidates, recorded_candidate
from headrace.actors.simulation.tuning.command import TuneRequest, prepare_tuning, run_tuning
from headrace.actors.simulation.tuning.duration_fit import fit
from headrace.actors.simulation.tuning.picture import page
from headrace.actors.simulation.tuning.recorded_run import read_run, working_s
from headrace.actors.simulation.tuning.records import read_traces
from headrace.actors.simulation.tuning.result import TuningResult
from headrace.actors.simulation.tuning.search import survivors
from headrace.actors.simulation.tuning.selection import Prediction, choose, is_worth_it, pareto_front
from headrace.actors.simulation.tuning.trial import Trial, run_trial
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.core.config import BufferConfig

pytestmark = pytest.mark.timeout(300)

TRUTH = SimulationPlan(
    durations=DurationsConfig(
        mean_s=30, median_s=25, cap_s=300, task_share=0.5, solved_shift=-0.5, stragglers=0.08, straggler_factor=5
    ),
    slots=8,
    batch_size=4,
    group_size=4,
    max_staleness=2,
    learner_s=3,
    push_s=1,
    evaluate_s=0.5,
    steps=24,
    tasks=64,
    turns=1,
)
"""Latency-bound: the learner takes a fraction of what the rollouts of a batch take."""


@pytest.mark.parametrize(
    ("phases_s", "seconds"),
    [
        ((("boot", 9.0), ("service.user", 2.0), ("agent", 1.0), ("agent", 0.5), ("evaluate", 9.0)), 3.5),
        ((("service.user", 2.0), ("agent", 1.0), ("service.grader", 9.0), ("evaluate", 9.0)), 3.0),
        ((("boot", 9.0),), 0.0),
    ],
)
def test_services_belong_to_the_agent_or_to_the_evaluation(
    phases_s: tuple[tuple[str, float], ...], seconds: float
) -> None:
    assert working_s(phases_s) == seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of TRUTH."""
    folder = tmp_path_factory.mktemp("tuning") / "run"
    run_plan(TRUTH, folder)
    return folder


SMALL = Space(slots=(8,), bounds=(4,), rules=("fraction(0.5)",))


def trial(**figures: Any) -> Trial:
    names = ("rule", "unfinished", "max_staleness", "slots", "over_issue")
    given = {name: figures.pop(name) for name in names if name in figures}
    setting: dict[str, Any] = {"rule": "all", "unfinished": "carry", "max_staleness": 4, "slots": 8} | given
    whole: dict[str, Any] = {
        "steps": 8,
        "step_s": 10.0,
        "mean_staleness": 1.0,
        "max_staleness": 2,
        "waste": 0.0,
        "evictions": 0.0,
        "slow_share": 1.0,
        "reward_bias": 0.0,
        "learner_share": 0.5,
    }
    return Trial(candidate=Candidate(**setting), **(whole | figures))


def test_a_run_is_read_from_its_ledger(run: Path) -> None:
    recording = read_run(run)
    told = recording.settings
    sizes = {key: told[key] for key in ("slots", "batch_size", "group_size", "max_staleness", "rule")}
    assert sizes == {"slots": 8, "batch_size": 4, "group_size": 4, "max_staleness": 2, "rule": "all"}
    assert told["learner_s"] == pytest.approx(3)
    assert told["boot_s"] == pytest.approx(1, rel=0.15)
    assert told["evaluate_s"] == pytest.approx(0.5, rel=0.2)
    assert recording.step_s is not None
    assert recording.step_s > 2 * TRUTH.learner_s
    attempts = read_evidence(run).attempts
    in_flight = sum(attempt.ended_at_s is None for attempt in attempts)
    cut = sum(attempt.ended_at_s is not None and attempt.reward is None for attempt in attempts)
    unfinished = len(recording.observations) - len(recording.finished)
    assert 0 < in_flight <= unfinished <= in_flight + cut
    assert len(recording.finished) == sum(attempt.reward is not None for attempt in attempts)


def test_the_failure_rate_is_read_from_a_run(tmp_path: Path) -> None:
    failing = TRUTH.model_copy(update={"failure": 0.2, "steps": 12})
    run_plan(failing, tmp_path / "run")
    recording = read_run(tmp_path / "run")
    assert recording.failure == pytest.approx(0.2, abs=0.08)


def test_jsonl_and_csv_traces_are_read_alike(tmp_path: Path) -> None:
    rows = [("a", 1.5, 1.0, True), ("a", 2.5, None, False), ("b", 3.5, 0.0, True)]
    lines = [dict(zip(("task", "seconds", "reward", "finished"), row, strict=True)) for row in rows]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    text = "task,seconds,reward,finished\na,1.5,1,true\na,2.5,,False\nb,3.5,0,1\n"
    (tmp_path / "t.csv").write_text(text)
    first, second = read_traces(tmp_path / "t.jsonl"), read_traces(tmp_path / "t.csv")
    assert first.observations == second.observations
    assert [observation.finished for observation in first.observations] == [True, False, True]
    assert [observation.solved for observation in first.observations] == [True, None, False]


def test_a_trace_counts_as_solved_by_its_column_or_a_reward_of_1(tmp_path: Path) -> None:
    text = "seconds,reward,solved\n1,0.1,\n1,1,\n1,-1,true\n1,5,no\n1,,yes\n"
    (tmp_path / "t.csv").write_text(text)
    observations = read_traces(tmp_path / "t.csv").observations
    assert [observation.solved for observation in observations] == [False, True, True, False, True]


def test_a_partial_reward_in_a_run_does_not_count_as_solved(run: Path, tmp_path: Path) -> None:
    formatted = shutil.copytree(run, tmp_path / "formatted")
    with closing(sqlite3.connect(formatted / "ledger.db")) as database, database:
        database.execute("UPDATE attempts SET reward = 0.1 WHERE reward = 0.0")
    assert fit(read_run(formatted)) == fit(read_run(run))


BAD = {
    "unknown column": ("t.csv", "seconds,colour\n1,red\n", "unknown column colour; known: seconds"),
    "no seconds": ("t.csv", "task,reward\na,1\n", "missing column seconds (columns: reward, task)"),
    "negative": ("t.jsonl", '{"seconds": -1}\n', "seconds must be a number of at least 0 (given: -1)"),
    "not finite": ("t.csv", "seconds\nnan\n", "seconds is not a number (given: 'nan')"),
    "torn": ("t.jsonl", '{"seconds": 1}\n{"sec', ":2: not valid JSON"),
    "no truth": ("t.csv", "seconds,finished\n1,maybe\n", "finished is neither true nor false"),
    "short row": ("t.csv", "seconds,task\n1\n", "the number of fields differs"),
    "binary": ("t.csv", b"\xff\xfe\x00", "not UTF-8 text"),
    "empty": ("t.csv", "", "missing column seconds"),
    "few": ("t.csv", "seconds\n1\n2\n", "2 of 2 attempts finished, but a fit needs 24"),
    "no learner": ("t.csv", "seconds\n" + "1\n" * 30, "--set learner_s=SECONDS"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces_print_one_line_and_exit_with_code_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, said = BAD[name]
    path = tmp_path / file
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert _tune(monkeypatch, path) == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--accept", "count(5)"], "count(5) can never be met with group_size = 4"),
        (["--accept", "most"], "'most' is not a rule"),
        (["--set", "learner_s=soon"], "learner_s"),
        (["--set", "colour=1"], "unknown key colour"),
        (["--out", "/dev/null/here"], "cannot be written"),
    ],
)
def test_bad_options_print_one_line_and_exit_with_code_2(
    run: Path,
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _tune(monkeypatch, run, *options) == cli.EXIT_BAD_INPUT
    assert said in capsys.readouterr().err


def test_folders_that_are_not_runs_and_missing_runs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _tune(monkeypatch, tmp_path) == cli.EXIT_BAD_INPUT
    assert "has no ledger.db" in capsys.readouterr().err
    assert _tune(monkeypatch, tmp_path / "none") == cli.EXIT_BAD_INPUT
    assert "no such run or file" in capsys.readouterr().err


def _tune(monkeypatch: pytest.MonkeyPatch, source: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", "tune", str(source), "--quiet", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_buffer_accepts_every_candidate(run: Path) -> None:
    recording = read_run(run)
    base = SimulationPlan.model_validate(recording.settings)
    found = candidates(base, fit(recording), Space(), sandboxes=14)
    assert found[0] == recorded_candidate(base)
    assert len(set(found)) == len(found)
    for candidate in found:
        candidate.plan(base, steps=1).buffer_config()
    assert {candidate.slots for candidate in found} == {4, 8, 14}
    assert {candidate.max_staleness for candidate in found} == {1, 2, 4}
    assert {candidate.unfinished for candidate in found} == {"carry", "abort"}
    assert max(candidate.over_issue for candidate in found) == 1
    assert not any(candidate.rule == "all | expiring(1)" and candidate.max_staleness == 1 for candidate in found)


def test_the_bias_caused_by_lost_rollouts_is_measured() -> None:
    """Aborting slow rollouts trains hardly any of the slowest decile; carrying them loses none without evictions."""
    telling = TRUTH.durations.model_copy(update={"task_share": 0.1, "solved_shift": -2.5})
    base = TRUTH.model_copy(update={"durations": telling})
    roomy = Candidate(rule="fraction(0.5)", unfinished="carry", max_staleness=30, slots=8)
    carried = run_trial(roomy, base, 16)
    aborted = run_trial(Candidate(rule="fraction(0.5)", unfinished="abort", max_staleness=30, slots=8), base, 16)
    assert isinstance(carried, Trial)
    assert isinstance(aborted, Trial)
    assert carried.slow_share == pytest.approx(1, abs=1e-9)
    assert (carried.waste, carried.reward_bias) == (0, 0)
    assert aborted.slow_share < 0.5
    assert aborted.waste > 0.2
    # What solves its task is shorter here.
    assert aborted.reward_bias > 0.02
    assert aborted.length_bias == pytest.approx(1 - aborted.slow_share)


def test_the_choice_prefers_speed_then_low_loss_then_low_staleness() -> None:
    fast_but_biased = trial(step_s=10.0, slow_share=0.3, rule="count(3)")
    stale = trial(step_s=10.2, mean_staleness=2.0, slots=9)
    fresh = trial(step_s=10.25, mean_staleness=1.0, waste=0.005, slots=10)
    slow = trial(step_s=11.0, mean_staleness=0.0, slots=11)
    trials = [fast_but_biased, stale, fresh, slow]
    assert choose(trials) == choose(trials[::-1]) == fresh
    assert choose(trials, within=0.0) == fast_but_biased
    assert choose(trials, within=0.2) == slow


def test_the_pareto_front_has_all_undominated_trials() -> None:
    best, other, beaten = trial(step_s=9, slots=1), trial(mean_staleness=0.5, slots=2), trial(step_s=12, slots=3)
    assert pareto_front([best, other, beaten]) == [best, other]
    twins = [trial(slots=1), trial(slots=2)]
    assert pareto_front(twins) == twins


def test_surviving_trials_are_the_fastest_and_those_on_the_pareto_front() -> None:
    ladder = [trial(step_s=10.0 + place, slots=place + 1) for place in range(9)]
    fresh = trial(step_s=40, mean_staleness=0.1, slots=99)
    recorded = ladder[0].candidate
    assert survivors([*ladder, fresh], recorded) == [ladder[1].candidate, ladder[2].candidate, fresh.candidate]


@pytest.fixture(scope="module")
def tuned(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TuningResult, Path]:
    """Of two rules, by one process."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    request = TuneRequest(source=run, out=out, steps=8, space=SMALL, processes=1)
    said: list[tuple[int, int, int]] = []
    found = run_tuning(prepare_tuning(request), lambda *now: said.append(now))
    assert said[-1] == (3, 6, 6)
    return found, out


@pytest.mark.whole
def test_tuning_finds_a_faster_rule_and_writes_it(tuned: tuple[TuningResult, Path]) -> None:
    found, out = tuned
    assert found.chosen.candidate != found.searched.recorded.candidate
    assert found.searched.chosen_prediction.step_s < found.searched.recorded_prediction.step_s
    pasted = tomllib.loads((out / "tuning.toml").read_text())
    kept = BufferConfig.model_validate(pasted["buffer"] | {"batch_size": 4, "group_size": 4})
    assert (kept.rule, kept.max_staleness) == (found.chosen.candidate.rule, 4)
    assert (out / "tuning.png").read_bytes().startswith(b"\x89PNG")
    written = orjson.loads((out / "tuning.json").read_bytes())
    assert written["chosen"]["rule"] == kept.rule


@pytest.mark.whole
def test_the_number_of_processes_does_not_change_the_result(run: Path, tuned: tuple[TuningResult, Path]) -> None:
    request = TuneRequest(source=run, steps=8, space=SMALL, processes=2)
    assert run_tuning(prepare_tuning(request), lambda *_: None).to_json() == tuned[0].to_json()


def test_the_page_is_self_contained_and_escaped(tuned: tuple[TuningResult, Path]) -> None:
    found, out = tuned
    text = (out / "tuning.html").read_text()
    picture = text[text.index("data:image") : text.index('"', text.index("data:image"))]
    assert not re.search(r"https?:|src=\"(?!data:)|<link|<script|@import|url\(", text.replace(picture, "data:"))
    hostile = replace(found, recording=replace(found.recording, source="<script>alert('x')</script>"))
    assert "<script>" not in page(hostile, b"")
    assert "&lt;script&gt;" in page(hostile, b"")


@pytest.mark.parametrize(
    ("chosen", "times_s", "worth"),
    [
        ({}, (9.0, 8.8, 9.2), True),
        ({}, (9.9, 9.4, 10.4), False),
        ({}, (10.2, 9.8, 10.6), False),
        ({"waste": 0.0, "mean_staleness": 0.5}, (10.2, 9.8, 10.6), False),
        ({"waste": 0.0, "mean_staleness": 0.5}, (10.0, 9.8, 10.6), True),
    ],
    ids=["faster", "faster within the noise", "slower within the noise", "fresher but slower", "fresher"],
)
def test_a_setting_that_other_seeds_do_not_confirm_is_not_recommended(
    chosen: dict[str, Any], times_s: tuple[float, float, float], worth: bool
) -> None:
    before = Prediction(step_s=10.0, least_s=9.6, greatest_s=10.4)
    after = Prediction(step_s=times_s[0], least_s=times_s[1], greatest_s=times_s[2])
    assert is_worth_it(trial(), trial(slots=6, **chosen), before, after) is worth


def test_a_slightly_slower_setting_with_less_loss_is_chosen() -> None:
    before = after = Prediction(step_s=10.0, least_s=9.6, greatest_s=10.4)
    assert is_worth_it(trial(waste=0.1), trial(slots=6), before, after)
