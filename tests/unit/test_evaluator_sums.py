"""Reward maps, sums of evaluators, and evaluators that are functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.evaluation.graders.functions import score_by_function
from headrace.actors.evaluation.graders.rewards import summed, with_rewards
from headrace.actors.evaluation.graders.verdict import (
    NO_SANDBOX,
    Author,
    EpisodeRecord,
    EvaluationRequest,
    EvaluatorFault,
    SpokenPart,
    Verdict,
    broken,
    failed,
    invalid,
    rewarded,
    solved,
)
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.evaluators import EvaluatorPart, FunctionEvaluator, NoEvaluator, RewardMap
from headrace.buffer.tasks.task import Task, TaskId, load_tasks, task_digest, write_tasks
from headrace.buffer.trajectories.types import Cause

STATE = {"kind": "state", "check": "raise SystemExit(1)"}
FUNCTION = {"kind": "function", "function": "support.scoring_functions:brevity"}
SUM = {"kind": "sum", "parts": [{"name": "tests", "evaluator": STATE}, {"name": "short", "evaluator": FUNCTION}]}
REPOSITORY = {"kind": "repository", "repository": {"workdir": "/r", "grader": {"kind": "eval_cmd", "command": "x"}}}
SIGNS = RewardMap(solved=1.0, failed=-1.0)


def load(folder: Path, evaluator: dict[str, Any], **fields: object) -> Task:
    path = folder / "tasks.jsonl"
    line = {"id": "one", "family": "words", "instruction": "do it", "evaluator": evaluator, **fields}
    path.write_text(json.dumps(line))
    return load_tasks(path)[0]


async def scored(function: str, *, timeout_s: float = 20.0, episode: EpisodeRecord | None = None) -> Verdict:
    name = f"support.scoring_functions:{function}"
    spec = FunctionEvaluator(function=name, timeout_s=timeout_s)
    task = Task(id=TaskId("one"), family="words", instruction="do it", evaluator=spec)
    return await score_by_function(
        spec, task, EvaluationRequest(key="1", task_id=task.id, sandbox=NO_SANDBOX, episode=episode)
    )


RECORD = EpisodeRecord(
    parts=(SpokenPart(source=Author.TASK, text="do it"), SpokenPart(source=Author.POLICY, text="yes")),
    artifacts={"note": "done"},
)


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        (solved(), 1.0),
        (failed(""), -1.0),
        (invalid(""), -1.0),
        (rewarded(0.4, solved=False), -1.0),
        (broken("x"), None),
        (Verdict(reward=None, cause=Cause.INFRA), None),
    ],
)
def test_a_map_replaces_rewards_but_never_gives_one_to_a_fault(verdict: Verdict, reward: float | None) -> None:
    mapped = with_rewards(verdict, SIGNS)
    assert (mapped.reward, mapped.cause, mapped.solved) == (reward, verdict.cause, verdict.solved)
    assert with_rewards(verdict, None) == verdict


def test_maps_and_parts_are_read_back_and_absent_from_other_digests(tmp_path: Path) -> None:
    tasks = [load(tmp_path, STATE), load(tmp_path, STATE | {"rewards": {"failed": -1.0}}), load(tmp_path, SUM)]
    assert tasks[1].evaluator.rewards == SIGNS
    assert len({task_digest(task) for task in tasks}) == 3
    for task in tasks:
        write_tasks(tmp_path / "out.jsonl", [task])
        assert load_tasks(tmp_path / "out.jsonl") == (task,)
    write_tasks(tmp_path / "out.jsonl", tasks[:1])
    assert not {"rewards", "parts", "function"} & json.loads((tmp_path / "out.jsonl").read_text())["evaluator"].keys()


def test_a_sum_finds_the_repository_of_a_part(tmp_path: Path) -> None:
    parts = [{"name": "short", "evaluator": FUNCTION}, {"name": "tests", "evaluator": REPOSITORY}]
    repository = load(tmp_path, {"kind": "sum", "parts": parts}).repository
    assert repository is not None
    assert repository.workdir == "/r"


def test_checks_of_parts_may_be_references(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text("raise SystemExit(0)")
    part = {"name": "tests", "evaluator": STATE | {"check": {"file": "check.py"}}}
    task = load(tmp_path, {"kind": "sum", "parts": [part]})
    assert task.evaluator.parts[0].evaluator.check == "raise SystemExit(0)"


@pytest.mark.parametrize(
    ("evaluator", "said"),
    [
        (STATE | {"rewards": {"solved": -1.0, "failed": 1.0}}, "rewards: must satisfy"),
        (STATE | {"rewards": {"solved": 1e7}}, "rewards: must satisfy"),
        (STATE | {"parts": SUM["parts"]}, "evaluator.parts: unknown field of the kind state"),
        ({"kind": "sum"}, "evaluator.parts: is missing; add it"),
        ({"kind": "sum", "parts": []}, "evaluator.parts: is empty"),
        (SUM | {"check": "1"}, "evaluator.check: unknown field of the kind sum"),
        ({"kind": "function"}, "evaluator.function: is missing; add it"),
        ({"kind": "function", "function": "module"}, "must be written as package.module:function"),
        (
            {"kind": "sum", "parts": [{"name": "a", "evaluator": SUM}]},
            "parts.0.evaluator.kind: must be one of",
        ),
        ({"kind": "sum", "parts": [{"name": "a", "evaluator": STATE}] * 2}, "'a' must be a name of its own"),
        (
            {"kind": "sum", "parts": [{"name": "a", "evaluator": STATE | {"check": ""}}]},
            "parts.0.evaluator.check: is empty",
        ),
        ({"kind": "sum", "parts": [{"name": n, "evaluator": REPOSITORY} for n in "ab"]}, "more than one has a repo"),
    ],
)
def test_invalid_sums_functions_and_maps_are_refused(tmp_path: Path, evaluator: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        load(tmp_path, evaluator)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def named(*verdicts: Verdict) -> list[tuple[EvaluatorPart, Verdict]]:
    spec = NoEvaluator()
    weights = (1.0, 0.5)
    names = ("tests", "short")
    return [
        (EvaluatorPart(name=name, evaluator=spec, weight=weight), verdict)
        for name, weight, verdict in zip(names, weights, verdicts, strict=False)
    ]


def test_a_sum_keeps_its_parts_and_is_solved_by_the_first() -> None:
    verdict = summed(named(failed("2 tests"), rewarded(1.0, solved=True)))
    assert (verdict.reward, verdict.solved, verdict.cause) == (0.5, False, Cause.FAILED)
    assert verdict.parts == {"tests": (0.0, 1.0), "short": (1.0, 0.5)}
    assert verdict.detail == "tests 0 x 1; short 1 x 0.5; tests: 2 tests"
    assert summed(named(solved(), failed(""))).cause is Cause.SOLVED


@pytest.mark.parametrize("lost", [broken("x"), Verdict(reward=None, cause=Cause.INFRA, detail="x")])
def test_a_part_without_a_reward_leaves_the_sum_without_one(lost: Verdict) -> None:
    verdict = summed(named(solved(), lost))
    assert (verdict.reward, verdict.cause, verdict.detail) == (None, lost.cause, "short: x")


def test_a_sum_out_of_bounds_is_a_fault() -> None:
    with pytest.raises(EvaluatorFault, match="not a finite number"):
        summed(named(rewarded(1e6, solved=None), rewarded(1e6, solved=None)))


@pytest.mark.asyncio
async def test_functions_see_the_record_and_may_print_or_be_asynchronous() -> None:
    verdict = await scored("brevity", episode=RECORD)
    assert (verdict.reward, verdict.solved, verdict.cause) == (0.25, False, Cause.FAILED)
    verdict = await scored("has_note", episode=RECORD)
    assert (verdict.reward, verdict.solved, verdict.detail) == (0.25, True, "words")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "LookupError: no dictionary"),
        ("leaves", "returned no JSON"),
        ("wrong_type", "the reward is not a number"),
        ("infinite", "not a finite number"),
        ("no_boolean", "`solved` that is no boolean"),
        ("absent", "AttributeError"),
    ],
)
async def test_errors_of_functions_are_the_evaluators_fault(function: str, said: str) -> None:
    verdict = await scored(function, episode=RECORD)
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)
    assert said in verdict.detail


@pytest.mark.asyncio
async def test_a_function_that_hangs_is_killed_at_its_deadline() -> None:
    verdict = await scored("hangs", timeout_s=0.5, episode=RECORD)
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)
    assert "exceeded timeout_s=0.5" in verdict.detail


@pytest.mark.asyncio
async def test_a_function_needs_a_record() -> None:
    verdict = await scored("brevity")
    assert (verdict.cause, verdict.reward) == (Cause.EVALUATOR, None)
