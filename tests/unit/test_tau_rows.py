"""Rows of tau-bench and tau2-bench: the tasks they become, and what is refused with which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.environments.retail.tools import TOOLS
from headrace.buffer.tasks.datasets.converters import SettingsRefused, convert
from headrace.buffer.tasks.datasets.rows import RowRefused
from headrace.buffer.tasks.datasets.tau import (
    INSTRUCTION,
    READS,
    WRITES,
    TauSettings,
    read_retail,
    task_of,
    tau2_task_of,
)
from headrace.buffer.tasks.task import load_tasks, task_digest
from support.conversions import split
from support.retail_shop import CANCEL, retail_task, secret_of
from support.retail_shop import INSTRUCTION as WISHES

ROW = {"index": 4, "metadata": secret_of(CANCEL, outputs=["red"])}
SCENARIO = {
    "persona": None,
    "instructions": {
        "domain": "retail",
        "known_info": "You are Una Bergh in 10001.",
        "reason_for_call": "You want to cancel #W1.",
        "unknown_info": None,
        "task_instructions": ".",
    },
}


def tau2(*, name: str = "7", **criteria: Any) -> dict[str, Any]:
    actions = [{"action_id": "7_0", "name": CANCEL["name"], "arguments": CANCEL["kwargs"], "info": None}]
    criteria = {"actions": actions, "reward_basis": ["DB", "NL_ASSERTION"]} | criteria
    return {"id": name, "user_scenario": SCENARIO, "initial_state": None, "evaluation_criteria": criteria}


def test_a_row_of_tau_bench_becomes_a_task() -> None:
    task = task_of(ROW, name="train")
    assert (task.id, task.family, task.instruction) == ("retail-train-4", "tau/retail", INSTRUCTION)
    assert task.environment is not None
    assert (task.environment.kind, task.environment.secret) == ("retail", ROW["metadata"])
    assert WISHES not in task.instruction


def test_a_task_of_tau2_bench_becomes_a_task() -> None:
    task = tau2_task_of(tau2(communicate_info=["red"], nl_assertions=["The agent says red."]), TauSettings())
    assert task.environment is not None
    instruction = "You are Una Bergh in 10001. You want to cancel #W1."
    assert task.environment.secret == secret_of(CANCEL, instruction=instruction, outputs=["red"]) | {"user_id": ""}
    assert task.id == "retail-tau2-7"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"initial_state": {"message_history": []}}, "initial_state: an episode always starts"),
        ({"evaluation_criteria": None}, "evaluation_criteria.actions: is missing"),
        ({"user_scenario": {"instructions": {"domain": "retail"}}}, "instruction: is empty"),
        ({"user_scenario": {"instructions": {"domain": "airline"}}}, "domain: must be retail"),
        ({"user_scenario": {"instructions": "Cancel it."}}, "user_scenario.instructions: "),
        ({"user_scenario": {"instructions": 3}}, "user_scenario.instructions"),
        ({"id": None}, "id: "),
    ],
)
def test_tau2_tasks_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        tau2_task_of(tau2() | changes, TauSettings())


@pytest.mark.parametrize(
    ("criteria", "reason"),
    [
        ({"actions": None}, "evaluation_criteria.actions: is missing"),
        ({"actions": [{"name": "create_task", "arguments": {}}]}, "actions: create_task is not a tool"),
        ({"env_assertions": [{"func_name": "f"}]}, "env_assertions: cannot be graded"),
        ({"reward_basis": ["DB", "ENV_ASSERTION"]}, "reward_basis: ENV_ASSERTION cannot be graded"),
        ({"nl_assertions": ["The agent is kind."]}, "nl_assertions: cannot be graded"),
    ],
)
def test_tau2_criteria_that_cannot_be_graded(criteria: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        tau2_task_of(tau2(**criteria), TauSettings())


def test_tasks_without_writes_have_a_family_of_their_own() -> None:
    idle = ROW | {"metadata": secret_of({"name": "think", "kwargs": {"thought": "hm"}})}
    assert task_of(idle, name="test").family == "tau/retail-without-writes"


def test_assertions_can_be_ignored() -> None:
    task = tau2_task_of(tau2(nl_assertions=["The agent is kind."]), TauSettings(ignore_assertions=True))
    assert task.id == "retail-tau2-7"


def test_bad_rows_do_not_end_a_conversion(tmp_path: Path) -> None:
    source = tmp_path / "tasks_dev.jsonl"
    lines = [json.dumps(ROW), "", "{", json.dumps(ROW), json.dumps({"index": 1}), json.dumps(ROW | {"index": 5})]
    source.write_text("\n".join(lines))
    converted = convert(source, tmp_path / "out", form="tau", settings={})
    assert converted.count == 2
    assert [refusal.line for refusal in converted.refusals] == [3, 4, 5]
    assert "duplicate" in converted.refusals[1].reason
    tasks = load_tasks(converted.tasks)
    read = {task.id: task for task in reversed(split(read_retail(source, TauSettings()))[0])}
    assert tasks == tuple(read[task.id] for task in tasks)
    assert [task.id for task in tasks] == ["retail-dev-4", "retail-dev-5"]


def test_splits_of_tau2_bench(tmp_path: Path) -> None:
    source = tmp_path / "tasks.json"
    source.write_text(json.dumps([tau2(name="1"), tau2(name="2"), tau2(name="3")]))
    (tmp_path / "split_tasks.json").write_text(json.dumps({"test": ["3", "1", "9"]}))
    tasks, refusals = split(read_retail(source, TauSettings(split="test")))
    assert [task.id for task in tasks] == ["retail-tau2-3", "retail-tau2-1"]
    assert [refusal.line for refusal in refusals] == [3]
    assert len(split(read_retail(source, TauSettings()))[0]) == 3
    with pytest.raises(SettingsRefused, match=r"split: 'dev' is not in split_tasks\.json; it has test"):
        convert(source, tmp_path / "out", form="tau", settings={"split": "dev"})
    with pytest.raises(SettingsRefused, match="speed: unknown setting; the settings are split, ignore_assertions"):
        convert(source, tmp_path / "out", form="tau", settings={"speed": 1})


def test_the_converter_knows_all_tools() -> None:
    """tau2-bench has one tool more, which only reads."""
    assert TOOLS.keys() | {"get_item_details"} == WRITES | READS
    assert not WRITES & READS


def test_a_task_without_an_environment_keeps_its_digest() -> None:
    task = retail_task({})
    bare = type(task)(id=task.id, family="f", instruction="i", evaluator=task.evaluator)
    assert task_digest(bare) != task_digest(task)
    assert bare.environment is None
    # That of versions without environments.
    assert task_digest(bare) == "e4d2923fdb8eb6b65db7aad751e94e44214cabecbeb741df73026f9b03d2d5a7"
