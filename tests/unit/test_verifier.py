"""Reward files of verifiers, and the specs of verifiers in task files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.evaluation.graders.verdict import EvaluatorFault
from headrace.actors.evaluation.graders.verifier import parse_reward
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.task import load_tasks, task_digest, write_tasks
from headrace.buffer.tasks.verifiers import VerifierForm, pytest_files

HIDDEN = {"/tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}
HARBOR: dict[str, Any] = {"kind": "verifier", "verifier": {"form": "harbor"}, "hidden_files": HIDDEN}
TESTS = {"/tests/test_final_state.py": "def test_it(): pass\n", "/tests/helper.py": ""}
PYTEST: dict[str, Any] = {"kind": "verifier", "verifier": {"form": "pytest"}, "hidden_files": TESTS}


def task_file(folder: Path, evaluator: object) -> Path:
    line = {"id": "one", "family": "words", "instruction": "do it", "evaluator": evaluator}
    (folder / "tasks.jsonl").write_text(json.dumps(line))
    return folder / "tasks.jsonl"


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("txt", "1", 1.0),
        ("txt", " 2.5 \n", 2.5),
        ("txt", "-1", -1.0),
        ("txt", "1e3", 1000.0),
        ("json", '{"reward": 0.25, "a": 1}', 0.25),
        ("json", '{"a": 1, "reward": 0}', 0.0),
        ("json", '{"reward": true}', 1.0),
        ("json", '{"a": 0.5}', 0.5),
        ("json", '{"a": 1, "b": 0}', 1.0),
    ],
)
def test_a_reward_file_gives_its_number(name: str, text: str, reward: float) -> None:
    assert parse_reward(name, text.encode())[0] == reward


def test_all_rewards_of_an_object_are_kept() -> None:
    assert parse_reward("json", b'{"a": 1, "b": 0}')[1] == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("txt", "", "is empty"),
        ("txt", " \n", "is empty"),
        ("txt", "nan", "not a finite number"),
        ("txt", "inf", "not a finite number"),
        ("txt", "PASS", "cannot be parsed"),
        ("txt", "1 2", "cannot be parsed"),
        ("txt", "\udcff", "cannot be parsed"),
        ("json", "", "is empty"),
        ("json", "{", "cannot be parsed"),
        ("json", "[" * 100_000, "cannot be parsed"),
        ("json", "0.75", "must be an object"),
        ("json", "[1]", "must be an object"),
        ("json", "{}", "must be an object"),
        ("json", '{"reward": {"a": 1}}', "not a finite number"),
        ("json", '{"reward": null}', "not a finite number"),
        ("json", '{"reward": "1"}', "not a finite number"),
        ("json", '{"reward": 1, "a": NaN}', "not a finite number"),
        ("json", '{"reward": 1' + "0" * 400 + "}", "not a finite number"),
    ],
)
def test_an_unusable_reward_file_is_the_evaluators_fault(name: str, text: str, said: str) -> None:
    with pytest.raises(EvaluatorFault, match=said):
        parse_reward(name, text.encode(errors="surrogateescape"))


@pytest.mark.parametrize("evaluator", [HARBOR, PYTEST, PYTEST | {"python": "/opt/venv/bin/python"}])
def test_verifiers_are_read_and_written(tmp_path: Path, evaluator: dict[str, Any]) -> None:
    tasks = load_tasks(task_file(tmp_path, evaluator))
    write_tasks(tmp_path / "again.jsonl", tasks)
    assert load_tasks(tmp_path / "again.jsonl") == tasks
    assert isinstance(tasks[0].evaluator.verifier.form, VerifierForm)  # type: ignore[union-attr]


def test_files_can_be_given_beside_the_task_file(tmp_path: Path) -> None:
    (tmp_path / "test.sh").write_text("exit 0\n")
    (task,) = load_tasks(task_file(tmp_path, HARBOR | {"hidden_files": {"/tests/test.sh": {"file": "test.sh"}}}))
    assert task.evaluator.hidden_files == {"/tests/test.sh": "exit 0\n"}


def test_the_verifier_is_part_of_the_digest(tmp_path: Path) -> None:
    (one,) = load_tasks(task_file(tmp_path, HARBOR))
    (other,) = load_tasks(task_file(tmp_path, HARBOR | {"verifier": {"form": "harbor", "live": True}}))
    assert task_digest(one) != task_digest(other)


@pytest.mark.parametrize(
    ("evaluator", "said"),
    [
        ({"kind": "verifier"}, "evaluator.verifier: is missing; add it"),
        (
            {"kind": "state", "check": "1", "verifier": {"form": "harbor"}},
            "verifier: unknown field of the kind",
        ),
        (HARBOR | {"verifier": {"form": "other"}}, "verifier.form: Input should be 'harbor' or 'pytest'"),
        (HARBOR | {"verifier": {"form": "harbor", "weights": {}}}, "verifier.weights: unknown field"),
        (HARBOR | {"hidden_files": {"/tests/run.sh": ""}}, "hidden_files: has no /tests/test.sh"),
        (HARBOR | {"hidden_files": HIDDEN | {"/opt/a": ""}}, "hidden_files: '/opt/a' must be below /tests"),
        (HARBOR | {"data_paths": ["/tests/data"]}, "data_paths: '/tests/data' overlaps with /tests"),
        (HARBOR | {"data_paths": ["/logs"]}, "data_paths: '/logs' overlaps with /logs"),
        (HARBOR | {"verifier": {"form": "harbor", "workdir": "app"}}, "workdir: 'app' must be an absolute path"),
        (HARBOR | {"verifier": {"form": "harbor", "allow_root": True}}, "allow_root: belongs to live verifiers"),
        (HARBOR | {"check": "1"}, "evaluator.check: unknown field of the kind verifier"),
        (PYTEST | {"hidden_files": {"/tests/helper.py": ""}}, "has no test_*.py"),
        (PYTEST | {"verifier": {"form": "pytest", "workdir": "/app"}}, "belong to the form harbor"),
        (PYTEST | {"python": "/workspace/python"}, "is below the data path '/workspace'"),
    ],
)
def test_unusable_verifiers_are_refused(tmp_path: Path, evaluator: object, said: str) -> None:
    with pytest.raises(TaskFileError) as refusal:
        load_tasks(task_file(tmp_path, evaluator))
    assert said in str(refusal.value)


def test_pytest_runs_the_files_that_are_named_as_tests() -> None:
    files = ("/tests/b_test.py", "/tests/conftest.py", "/tests/sub/test_a.py", "/tests/test.sh", "/tests/test_data.txt")
    assert pytest_files(files) == ("/tests/b_test.py", "/tests/sub/test_a.py")
