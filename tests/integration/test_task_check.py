"""`headrace data check` in real sandboxes: untouched files must fail, and solutions must pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.cli.held_out.task_check import check_answer
from headrace.buffer.tasks.evaluators import (
    AnswerEvaluator,
    AnswerSpec,
    EvaluatorPart,
    EvaluatorSpec,
    FunctionEvaluator,
    StateEvaluator,
    SumEvaluator,
    VerifierEvaluator,
)
from headrace.buffer.tasks.task import Task, TaskId, load_tasks, write_tasks
from headrace.buffer.tasks.verifiers import VerifierForm, VerifierSpec

PATH = "/workspace/answer"
IS_TWO = f"import sys; sys.exit(open({PATH!r}).read().strip() != '2')"
GRADE = f'#!/bin/bash\n[ "$(cat {PATH})" = 2 ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'


def state(name: str, check: str, content: str = "1\n") -> Task:
    evaluator = StateEvaluator(check=check)
    return Task(id=TaskId(name), family="own", instruction="write 2", evaluator=evaluator, files={PATH: content})


def verified(name: str) -> Task:
    evaluator = VerifierEvaluator(
        verifier=VerifierSpec(form=VerifierForm.HARBOR),
        hidden_files={"/tests/test.sh": GRADE},
    )
    return Task(id=TaskId(name), family="own", instruction="write 2", evaluator=evaluator, files={PATH: "1\n"})


def summed(name: str, *parts: EvaluatorSpec) -> Task:
    named = tuple(EvaluatorPart(name=f"p{number}", evaluator=part) for number, part in enumerate(parts))
    evaluator = SumEvaluator(parts=named)
    return Task(id=TaskId(name), family="own", instruction="write 2", evaluator=evaluator, files={PATH: "1\n"})


def answer(*targets: str) -> Task:
    evaluator = AnswerEvaluator(answer=AnswerSpec(targets=targets))
    return Task(id=TaskId("asked"), family="own", instruction="who?", evaluator=evaluator)


@pytest.mark.namespaces
def test_tasks_that_cannot_be_trained_on_are_left_out(tmp_path: Path) -> None:
    function = FunctionEvaluator(function="support.scoring_functions:brevity")
    file = state("", IS_TWO).evaluator
    tasks = [
        summed("both-files", file, verified("").evaluator),
        summed("solved-sum", replace(file, check="pass"), file),
        summed("with-episode", file, function),
        state("good", IS_TWO),
        state("no-gold", IS_TWO),
        state("wrong-gold", IS_TWO),
        state("solved", IS_TWO, content="2\n"),
        state("broken", "import absent_module"),
        verified("own/verified"),
        answer("Elm"),
    ]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    gold = tmp_path / "gold"
    (gold / "folder" / "solution").mkdir(parents=True)
    (gold / "folder" / "task.toml").write_text('[task]\nname = "own/verified"\n')
    (gold / "folder" / "solution" / "solve.sh").write_text(f"echo 2 > {PATH}\n")
    (gold / "good.sh").write_text(f"echo 2 > {PATH}; exit 1\n")
    (gold / "wrong-gold.sh").write_text("echo no such thing >&2; exit 7\n")
    command = ["data", "check", str(tmp_path / "tasks.jsonl"), "--gold", str(gold), "--quiet"]
    told = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "told.json")])
    assert told.exit_code == 3, told.output
    kept = [task.id for task in load_tasks(tmp_path / "checked.jsonl")]
    assert kept == ["both-files", "with-episode", "good", "no-gold", "own/verified", "asked"]
    checked = {row["task_id"]: row for row in json.loads((tmp_path / "told.json").read_text())["checked"]}
    assert (checked["good"]["untouched"], checked["good"]["gold"]) == (0.0, 1.0)
    assert checked["no-gold"]["gold"] is None
    assert checked["both-files"]["untouched"] == 0.0
    assert checked["with-episode"]["untouched"] is None, "it needs an episode, so it is not tried"
    assert checked["solved-sum"]["fault"] == "untouched files solve it already"
    assert "it exited with 7: no such thing" in checked["wrong-gold"]["fault"]
    assert checked["solved"]["fault"] == "untouched files solve it already"
    assert checked["broken"]["fault"].startswith("untouched files cannot be graded: ")


@pytest.mark.parametrize(
    ("targets", "fault"),
    [
        (("Elm", "oak"), None),
        (("Elm", "the"), "an empty answer solves it"),
        (("Elm", "a</answer>b"), "a target is not accepted"),
    ],
)
def test_answers_are_checked_without_a_sandbox(targets: tuple[str, ...], fault: str | None) -> None:
    task = answer(*targets)
    assert task.evaluator.answer is not None
    found = check_answer(task, task.evaluator.answer).fault
    assert found is None if fault is None else found is not None and fault in found


@pytest.mark.parametrize("gold", ["absent", "tasks.jsonl"])
def test_a_folder_of_solutions_must_exist(tmp_path: Path, gold: str) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [answer("Elm")])
    told = CliRunner().invoke(app, ["data", "check", str(tmp_path / "tasks.jsonl"), "--gold", str(tmp_path / gold)])
    assert str(told.exception) == f"--gold: {tmp_path / gold} is not a folder"
