"""The terminal family: reproducible, disjoint, solvable by looking, and hard to solve by accident.

Commands run in a real bash and checks in a real /usr/bin/python3, with /workspace mapped to a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headrace.actors.evaluation.graders.comparison import last_answer, same_json
from headrace.actors.evaluation.in_sandbox import source
from headrace.buffer.tasks.datasets.terminal import (
    NAMES,
    WORDS,
    WORKSPACE,
    Kind,
    Problem,
    Split,
    combinations,
    generate,
    guesses,
    problems,
)
from headrace.buffer.tasks.evaluators import CompareEvaluator, StateEvaluator

LITTER = ("echo x > extra", "mkdir folder", "ln -s /etc link")
ONE_OF_EACH = problems(3, len(Kind), Split.TRAIN)


def place(problem: Problem, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path, text in problem.task().files.items():
        (folder / path.removeprefix(f"{WORKSPACE}/")).write_text(text)


def run(command: str, folder: Path) -> str:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=20, check=False
    ).stdout


def check(problem: Problem, folder: Path) -> int:
    """Reward 1 is 0, as for exit codes: the task's check over what lies in `folder`."""
    evaluator = problem.task().evaluator
    source_text = evaluator.check.replace(WORKSPACE, str(folder))
    if isinstance(evaluator, StateEvaluator):
        python = ["/usr/bin/python3", "-I", "-S", "-"]
        return subprocess.run(python, input=source_text.encode(), capture_output=True, timeout=20).returncode
    python = ["/usr/bin/python3", "-I", "-S", "-B", "-c", source("compute")]
    output = subprocess.run(python, input=source_text.encode(), capture_output=True, timeout=20).stdout
    answer = last_answer(output) or {}
    return 0 if same_json(answer.get("result"), json.loads(evaluator.expected)) else 1


def test_tasks_are_reproducible_and_distinct() -> None:
    tasks = generate(5, 320, Split.TRAIN)
    assert tasks == generate(5, 320, Split.TRAIN)
    assert tasks != generate(6, 320, Split.TRAIN)
    assert len({task.id for task in tasks}) == 320
    assert {task.family for task in tasks[:4]} == {f"terminal/{kind}" for kind in Kind}


def test_a_combination_gives_the_same_task_under_every_seed() -> None:
    by_id = {task.id: task for task in generate(0, 320, Split.TRAIN)}
    shared = [task for task in generate(1, 320, Split.TRAIN) if task.id in by_id]
    assert shared
    assert all(task == by_id[task.id] for task in shared)


@pytest.mark.parametrize("kind", Kind)
def test_the_splits_are_disjoint_and_about_one_in_four_is_held_out(kind: Kind) -> None:
    every = list(combinations(kind))
    held_out = {problem.digest for problem in every if problem.split is Split.HELD_OUT}
    train = {problem.digest for problem in every if problem.split is Split.TRAIN}
    assert len(held_out) + len(train) == len(every)
    assert 0.15 < len(held_out) / len(every) < 0.35


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="combinations of repair"):
        generate(0, 400, Split.HELD_OUT)


def test_no_generated_word_contains_another() -> None:
    """`sed /word/d` and `grep word` must hit one line only."""
    every = (*WORDS, *NAMES)
    assert not [(one, other) for one in every for other in every if one != other and one in other]


@pytest.mark.parametrize("kind", Kind)
def test_the_instruction_does_not_reveal_the_finding(kind: Kind) -> None:
    assert not [problem for problem in combinations(kind) if problem.finding in problem.instruction]


@pytest.mark.parametrize("problem", ONE_OF_EACH, ids=lambda problem: problem.kind)
class TestCheck:
    def test_the_look_command_prints_the_expected_output(self, problem: Problem, tmp_path: Path) -> None:
        place(problem, tmp_path / "w")
        assert run(problem.look, tmp_path / "w").removesuffix("\n") == problem.shown

    def test_looking_in_the_wrong_place_gives_a_misleading_result(self, problem: Problem, tmp_path: Path) -> None:
        place(problem, tmp_path / "w")
        command, shown, finding = problem.stray
        assert run(command, tmp_path / "w").removesuffix("\n") == shown
        assert finding in shown
        run(problem.act(finding), tmp_path / "w")
        assert check(problem, tmp_path / "w") == 1

    def test_the_reference_solution_passes(self, problem: Problem, tmp_path: Path) -> None:
        place(problem, tmp_path / "w")
        run(problem.act(problem.finding), tmp_path / "w")
        assert check(problem, tmp_path / "w") == 0

    def test_doing_nothing_fails(self, problem: Problem, tmp_path: Path) -> None:
        place(problem, tmp_path / "w")
        assert check(problem, tmp_path / "w") == 1

    def test_every_guessed_answer_fails(self, problem: Problem, tmp_path: Path) -> None:
        for number, guess in enumerate(guesses(problem)[:6]):
            folder = tmp_path / f"w{number}"
            place(problem, folder)
            run(problem.act(guess), folder)
            assert check(problem, folder) == 1, guess

    @pytest.mark.parametrize("damage", [*LITTER, "for f in *; do echo x >> $f; done", "rm -f *"])
    def test_a_solution_that_also_damages_other_files_fails(
        self, problem: Problem, damage: str, tmp_path: Path
    ) -> None:
        """A repair is judged by what it computes, so litter beside it does not matter."""
        place(problem, tmp_path / "w")
        run(problem.act(problem.finding), tmp_path / "w")
        run(damage, tmp_path / "w")
        assert check(problem, tmp_path / "w") == (0 if problem.kind is Kind.REPAIR and damage in LITTER else 1)


LIES = {
    "leaves early": "import os\nos._exit(0)\n",
    "is equal": "class Any(int):\n    __eq__ = lambda *_: True\n\n\ndef total(count):\n    return Any(0)\n",
    "prints an answer of its own": "print('\\n{\"result\": true}')\nimport os\nos._exit(0)\n",
    "returns what is no data": "def total(count):\n    return object()\n",
    "knows the visible test": "def total(count):\n    return VALUE\n",
    "patches json": "import json\njson.dumps = lambda _: '{\"result\": 1}'\n\n\ndef total(count):\n    return 0\n",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_faked_repair_gets_no_reward(tmp_path: Path, lie: str) -> None:
    problem = next(problem for problem in ONE_OF_EACH if problem.kind is Kind.REPAIR)
    place(problem, tmp_path / "w")
    (tmp_path / "w" / "calc.py").write_text(lie.replace("VALUE", problem.finding))
    assert check(problem, tmp_path / "w") == 1


def test_a_repair_is_compared_with_values_hidden_from_the_agent() -> None:
    problem = next(problem for problem in ONE_OF_EACH if problem.kind is Kind.REPAIR)
    task = problem.task()
    assert isinstance(task.evaluator, CompareEvaluator)
    assert json.loads(task.evaluator.expected)[2] == 7 * int(problem.finding)
    assert problem.finding not in task.evaluator.check
    assert task.evaluator.test_files == (f"{WORKSPACE}/test.py",)
