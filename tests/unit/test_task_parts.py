"""Messages, environments, limits, origins and binary files of tasks: stored, read back, refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.evaluation.graders.verdict import task_resources
from headrace.actors.rollouts.stations import lowered
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.parts import TaskLimits, secret_in_prompt
from headrace.buffer.tasks.task import load_tasks, task_digest, write_tasks
from headrace.serve.gateway.capture.session import Budgets

SECRET = "You are Ada and you want to return the blue lamp without saying why."
LINE: dict[str, Any] = {
    "id": "one",
    "family": "shop",
    "instruction": "Serve the customer.",
    "evaluator": {"kind": "environment"},
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "environment": {"kind": "shop", "given": {"n": [1, 2.5, None]}, "secret": {"instruction": SECRET}},
    "limits": {"turns": 3, "memory_mb": 256, "cpus": 0.5, "agent_s": 12.5},
    "origin": {"source": "a shop", "split": "train", "licence": "MIT"},
}


def read(folder: Path, *lines: dict[str, Any]) -> tuple[Any, ...]:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return load_tasks(path)


def test_all_parts_are_read_back(tmp_path: Path) -> None:
    (task,) = read(tmp_path, LINE)
    write_tasks(tmp_path / "again.jsonl", [task])
    assert load_tasks(tmp_path / "again.jsonl") == (task,)
    assert pickle.loads(pickle.dumps(task)) == task
    assert [message.role for message in task.messages] == ["system", "user"]
    assert dict(task.limits.items()) == LINE["limits"]


@pytest.mark.parametrize("part", ["messages", "environment", "limits", "origin"])
def test_each_part_changes_the_digest(tmp_path: Path, part: str) -> None:
    (task,) = read(tmp_path, LINE)
    (without,) = read(tmp_path, {key: value for key, value in LINE.items() if key != part})
    assert task_digest(task) != task_digest(without)


def test_a_secret_is_not_in_a_task_s_representation(tmp_path: Path) -> None:
    (task,) = read(tmp_path, LINE)
    assert SECRET not in repr(task)


@pytest.mark.parametrize(
    "change",
    [
        {"instruction": f"Be nice. {SECRET} Bye."},
        {"messages": [{"role": "user", "content": SECRET}]},
        {"environment": LINE["environment"] | {"given": {"hint": SECRET}}},
        {"environment": LINE["environment"] | {"secret": {"a": [{"b": "Serve the customer. Serve the customer."}]}},
         "instruction": "Serve the customer. Serve the customer."},
    ],
)  # fmt: skip
def test_a_task_whose_prompt_contains_its_secret_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(TaskFileError, match="contains the environment's secret") as caught:
        read(tmp_path, LINE | change)
    assert SECRET not in str(caught.value)


def test_a_prompt_that_contains_a_hidden_test_is_refused(tmp_path: Path) -> None:
    test = "def test_total():\n    assert total([1, 2]) == 3\n"
    evaluator = {"kind": "state", "check": "raise SystemExit(1)", "hidden_files": {"/tests/test_total.py": test}}
    with pytest.raises(TaskFileError, match="contains a hidden file"):
        read(tmp_path, {"id": "a", "family": "f", "instruction": f"Pass this:\n{test}", "evaluator": evaluator})


def test_short_words_of_a_secret_may_occur_by_chance() -> None:
    assert secret_in_prompt({"reason": "no longer needed", "n": 3}, "say 'no longer needed'") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {"turns": 0}}, "limits.turns: 0 must be a number above 0"),
        ({"limits": {"truns": 1}}, "limits.truns: unknown field"),
        ({"messages": [{"role": "system", "content": "a"}]}, "the last one must be the user's"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages.0.role"),
        ({"environment": {"kind": ""}}, "environment.kind: is empty"),
        (
            {"evaluator": {"kind": "environment", "check": "1"}},
            "check: unknown field of the kind environment",
        ),
        ({"evaluator": {"kind": "answer"}}, "evaluator.answer: is missing; add it"),
        ({"evaluator": {"kind": "answer", "answer": {"targets": [" "]}}}, "has no target"),
        ({"evaluator": {"kind": "answer", "answer": {"targets": ["a"], "final": 2}}}, "the scores must satisfy"),
        ({"binary_files": {"/a": {"file": "../x"}}}, "outside the task file's folder"),
        ({"binary_files": {"/a": {"file": "missing"}}}, "cannot read"),
    ],
)
def test_invalid_parts_are_refused_with_their_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        read(tmp_path, LINE | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_binary_files_travel_by_reference(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "image.png").write_bytes(content)
    line = {key: value for key, value in LINE.items() if key != "evaluator"}
    line |= {"evaluator": {"kind": "none"}, "binary_files": {"/workspace/a.png": {"file": "image.png"}}}
    (task,) = read(tmp_path, line)
    (tmp_path / "run").mkdir()
    write_tasks(tmp_path / "run" / "tasks.jsonl", [task])
    (again,) = load_tasks((tmp_path / "run").rename(tmp_path / "moved") / "tasks.jsonl")
    assert again == task
    assert task_digest(again) == task_digest(task)
    assert again.binary_files["/workspace/a.png"].read() == content
    stored = Path(again.binary_files["/workspace/a.png"].file)
    stored.write_bytes(content[::-1])
    with pytest.raises(TaskFileError, match="has changed since its task was read"):
        again.binary_files["/workspace/a.png"].read()


def test_a_task_s_limits_only_lower_those_of_a_session() -> None:
    budgets = Budgets(max_turns=10, max_tokens_per_turn=100, max_context_tokens=1000, wall_s=60.0)
    limits = TaskLimits(turns=20, turn_tokens=50, sampled_tokens=400, agent_s=90.0)
    assert lowered(budgets, limits) == replace(budgets, max_tokens_per_turn=50, max_sampled_tokens=400)
    assert lowered(budgets, TaskLimits()) == budgets


def test_a_task_s_limits_reach_its_sandboxes(tmp_path: Path) -> None:
    (task,) = read(tmp_path, LINE)
    assert task_resources(task) == {"cpu": 0.5, "memory_bytes": 256 << 20, "disk_bytes": None}
