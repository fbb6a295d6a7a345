"""Lists of the cheats of `scripts/bench cheats`: their number, and the open ones named in the docs. Deadlines of
evaluations."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benches.cheating.cheat_bench import all_pairs
from benches.cheating.cheats import KNOWN_OPEN
from benches.cheating.repositories import REPOSITORIES

from headrace.actors.errors import ConfigError
from headrace.actors.run.task_sets import refuse_short_evaluation
from headrace.buffer.tasks.datasets import harbor
from headrace.buffer.tasks.datasets.swe import SweEnvironment, task_of, task_of_openclaw
from headrace.buffer.tasks.evaluators import StateEvaluator, VerifierEvaluator
from headrace.buffer.tasks.verifiers import VerifierForm, VerifierSpec


def test_the_cheat_bench_has_at_least_100_distinct_pairs() -> None:
    pairs = all_pairs()
    assert len(pairs) >= 100
    assert len({repository.name for repository, _ in pairs}) >= 12
    assert len({(cheat.name, repository.name) for repository, cheat in pairs}) == len(pairs)


def test_docs_list_every_known_open_cheat() -> None:
    text = (Path(__file__).parents[2] / "docs/attacks.md").read_text()
    [section] = re.findall(r"^## Known to be open$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    _, *rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", section, re.MULTILINE)
    assert rows == [(each.name, each.why) for each in KNOWN_OPEN]


def test_an_evaluation_deadline_too_short_for_twins_is_refused() -> None:
    task = REPOSITORIES[0].task()
    refuse_short_evaluation(task, 4 * task.evaluator.timeout_s)
    with pytest.raises(ConfigError, match=r"set rollout\.evaluate_timeout_s to 480"):
        refuse_short_evaluation(task, 90.0)
    refuse_short_evaluation(replace(task, evaluator=StateEvaluator(check="pass", timeout_s=120.0)), 90.0)
    verifier = VerifierSpec(form=VerifierForm.HARBOR)
    scored = VerifierEvaluator(verifier=verifier, timeout_s=600.0)
    refuse_short_evaluation(replace(task, evaluator=scored), 1800.0)
    with pytest.raises(ConfigError, match=r"set rollout\.evaluate_timeout_s to 1800"):
        refuse_short_evaluation(replace(task, evaluator=scored), 600.0)


RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"
AGENTS = ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code")
ROW = {
    "instance_id": "calc-7",
    "base_commit": "0" * 40,
    "problem_statement": "mean([]) raises",
    "test_patch": "diff --git a/tests/test_calc.py b/tests/test_calc.py\n",
    "FAIL_TO_PASS": ["tests/test_calc.py::test_empty"],
}


@pytest.mark.parametrize("name", AGENTS)
def test_tasks_that_are_converted_with_defaults_fit_the_recipes_of_agents(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("true")
    (tmp_path / "parse.py").write_text("pass")
    scripts = {"run_script_path": "run.sh", "parser_script_path": "parse.py", "fail_to_pass": ["t"]}
    wrapped = {key: ROW[key] for key in ("instance_id", "problem_statement")}
    rows: list[tuple[Any, Any]] = [
        (task_of, ROW),
        (task_of, {"metadata": wrapped | {"eval_cmd": "pytest"}}),
        (task_of, {"metadata": wrapped | {"swepro": scripts}}),
        (task_of, {"metadata": wrapped | {"remote_env_info": {"f2p_script": "pass"}}}),
        (task_of_openclaw, {"metadata": {"instance": ROW}, "text": "mean([]) raises"}),
    ]
    tasks = [convert(row, SweEnvironment(image="host"), tmp_path) for convert, row in rows]
    (tmp_path / "folder" / "tests").mkdir(parents=True)
    for path, text in (("task.toml", ""), ("instruction.md", "count"), ("tests/test.sh", "true")):
        (tmp_path / "folder" / path).write_text(text)
    (tmp_path / "folder" / "environment").mkdir()
    (tmp_path / "folder" / "environment" / "Dockerfile").write_text("FROM ubuntu:22.04\nWORKDIR /app\n")
    tasks.append(harbor.task_of(tmp_path / "folder", harbor.HarborSettings(images={"ubuntu:22.04": "host"})))
    recipe = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    for task in tasks:
        refuse_short_evaluation(task, recipe["rollout"]["evaluate_timeout_s"])
