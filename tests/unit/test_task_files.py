"""Task files: what is written is read back; what is wrong is refused on one line."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.datasets.terminal import Split, generate
from headrace.buffer.tasks.task import load_tasks, task_digest, tasks_digest, write_tasks

STATE = {"kind": "state", "check": "raise SystemExit(1)"}
REPOSITORY = {"workdir": "/repo", "grader": {"kind": "test_ids", "fail_to_pass": ["tests/test_a.py::test_b"]}}
LINE = {"id": "one", "family": "words", "instruction": "do it", "evaluator": STATE}


def write_lines(folder: Path, *lines: object) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def repository(**change: object) -> dict[str, Any]:
    return {"evaluator": {"kind": "repository", "repository": REPOSITORY | change}}


def test_the_default_interpreter_does_not_change_older_task_digests(tmp_path: Path) -> None:
    lines = [LINE, LINE | {"id": "two", "evaluator": STATE | {"python": "/usr/bin/python3"}}]
    one, two = load_tasks(write_lines(tmp_path, *lines))
    assert task_digest(one) == "623cb56274f69c900c45c59ffb1bdaef78164513e5ef92b152c163fccf8da1ca"
    assert task_digest(replace(two, id=one.id)) == task_digest(one)
    other = replace(one, evaluator=replace(one.evaluator, python="/opt/venv/bin/python"))
    assert task_digest(other) != task_digest(one)


def test_written_tasks_are_read_back_equal(tmp_path: Path) -> None:
    tasks = generate(0, 40, Split.TRAIN)
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, tasks)
    assert load_tasks(path) == tasks


def test_task_lines_get_defaults_and_referenced_files(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "start.txt").write_text("mango\n")
    line = LINE | {
        "files": {"/workspace/a": {"file": "start.txt"}},
        "evaluator": STATE | {"check": {"file": "check.py"}},
    }
    (task,) = load_tasks(write_lines(tmp_path, "", line, ""))
    assert task.files == {"/workspace/a": "mango\n"}
    assert task.evaluator.check == "import sys\nsys.exit(0)\n"
    assert (task.image, task.evaluator.kind, task.evaluator.data_paths) == (
        "host",
        "state",
        ("/workspace",),
    )


@pytest.mark.parametrize(
    "grader",
    [
        REPOSITORY["grader"],
        {"kind": "f2p_script", "script": "import pytest"},
        {"kind": "eval_cmd", "command": "pytest"},
        {"kind": "swepro", "run_script": "x", "parser_script": "y", "fail_to_pass": ["z"]},
    ],
)
def test_repositories_are_read_and_written(tmp_path: Path, grader: object) -> None:
    tasks = load_tasks(write_lines(tmp_path, LINE | repository(grader=grader)))
    write_tasks(tmp_path / "again.jsonl", tasks)
    assert load_tasks(tmp_path / "again.jsonl") == tasks
    assert pickle.loads(pickle.dumps(tasks)) == tasks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": 1}, "reward: unknown field"),
        ({"evaluator": STATE | {"chek": ""}}, "evaluator.chek: unknown field"),
        ({"instruction": 3}, "instruction: Input should be a valid string"),
        ({"instruction": ""}, "instruction: is empty"),
        ({"family": None}, "family: Input should be a valid string"),
        ({"evaluator": {"check": "1"}}, "evaluator.kind: is missing"),
        (
            {"evaluator": STATE | {"kind": "vibes"}},
            "evaluator.kind: must be one of 'state', 'patch', 'compare', 'repository', 'verifier', 'plugin', ",
        ),
        ({"evaluator": STATE | {"check": ""}}, "evaluator.check: is empty"),
        ({"evaluator": STATE | {"check": "def"}}, "evaluator.check: not valid Python"),
        ({"evaluator": STATE | {"check": {"file": "none.py"}}}, "evaluator.check: cannot read"),
        ({"evaluator": STATE | {"check": {"file": "../up.py"}}}, "outside the task file's folder"),
        ({"evaluator": STATE | {"timeout_s": "5"}}, "evaluator.timeout_s: Input should be a valid number"),
        ({"evaluator": STATE | {"timeout_s": 0}}, "evaluator.timeout_s: 0.0 must be a number above 0"),
        ({"evaluator": STATE | {"data_paths": ["/workspace/../etc"]}}, "evaluator.data_paths: '/workspace/../etc'"),
        ({"files": {"/workspace/a": {"file": "none.txt"}}}, "files./workspace/a: cannot read"),
        ({"files": {"/workspace/a": 1}}, "files./workspace/a: Input should be a valid string"),
        ({"files": {"a": ""}}, "files: 'a' must be an absolute path"),
        ({"evaluator": STATE | {"expected": "1"}}, "evaluator.expected: unknown field of the kind state; remove it"),
        (
            {"evaluator": STATE | {"repository": REPOSITORY}},
            "evaluator.repository: unknown field of the kind state",
        ),
        ({"evaluator": STATE | {"python": "python3"}}, "evaluator.python: 'python3' must be an absolute path"),
        (
            {"evaluator": STATE | {"python": "/a b"}},
            "evaluator.python: '/a b' must be an absolute path with only plain",
        ),
        ({"evaluator": STATE | {"python": "/workspace/p"}}, "'/workspace/p' is below the data path '/workspace'"),
        ({"evaluator": {"kind": "none", "python": "/bin/p"}}, "evaluator.python: unknown field of the kind none"),
        ({"evaluator": STATE | {"hidden_files": {"/workspace/a": ""}}}, "'/workspace/a' is below the data path"),
        ({"evaluator": {"kind": "repository"}}, "evaluator.repository: is missing; add it"),
        ({"evaluator": {"kind": "compare", "check": "result = 1"}}, "evaluator.expected: is missing; add it"),
        (
            {"evaluator": {"kind": "compare", "check": "result = 1", "expected": "{"}},
            "evaluator.expected: not valid JSON",
        ),
        ({"evaluator": {"kind": "compare", "expected": "1"}}, "evaluator.check: is missing; add it"),
        (repository(workdir="calc"), "evaluator.repository.workdir: 'calc' must be an absolute path"),
        (repository(python="python3"), "evaluator.repository.python: 'python3' must be an absolute path"),
        (repository(test_files=["../x"]), "evaluator.repository.test_files: '../x' must be a path in"),
        (repository(grader={"kind": "magic"}), "evaluator.repository.grader.kind: must be one of"),
        (repository(grader={"kind": "eval_cmd", "command": " "}), "evaluator.repository.grader.command: is empty"),
        (
            repository(grader={"kind": "eval_cmd", "command": "x", "shell": "y"}),
            "grader.shell: unknown field of the kind eval_cmd",
        ),
        (repository(grader={"kind": "test_ids", "fail_to_pass": []}), "grader.fail_to_pass: is empty"),
        (repository(grader={"kind": "test_ids", "fail_to_pass": ["x"]}), "'x' is not a test id of pytest"),
        (
            repository(grader={"kind": "swepro", "fail_to_pass": ["x"]}),
            "evaluator.repository.grader.run_script: is missing",
        ),
    ],
)
def test_an_invalid_line_is_refused_with_its_number_and_key(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write_lines(tmp_path, LINE | {"id": "first"}, "", LINE | change)
    with pytest.raises(TaskFileError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((LINE, LINE), ":2: id: 'one' is a duplicate of line 1"),
        (('{"id": "a", "id": "b"}',), ":1: id: duplicate key"),
        (("{",), ":1: not valid JSON"),
        (("[]",), ":1: must be one JSON object, not list"),
        (({"id": "a"},), "is missing"),
        (("", " "), "has no tasks"),
    ],
)
def test_invalid_task_lines_are_refused(tmp_path: Path, lines: tuple[object, ...], said: str) -> None:
    with pytest.raises(TaskFileError, match=".*".join(said.split())) as caught:
        load_tasks(write_lines(tmp_path, *lines))
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_an_unreadable_task_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"none\.jsonl: cannot be read: No such file or directory"):
        load_tasks(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskFileError, match="is not UTF-8"):
        load_tasks(tmp_path / "bytes.jsonl")


def test_different_tasks_have_different_digests() -> None:
    tasks = generate(0, 12, Split.TRAIN)
    assert len({task_digest(task) for task in tasks}) == 12
    assert task_digest(tasks[0]) == task_digest(generate(0, 1, Split.TRAIN)[0])
    assert tasks_digest(tasks) != tasks_digest(tasks[::-1])
