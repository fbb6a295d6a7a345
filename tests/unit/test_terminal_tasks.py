"""The terminal family: reproducible, disjoint, solvable by looking, and hard to solve by accident.

Commands run in a real bash and checks in a real /usr/bin/python3, with /workspace mapped to a temporary folder.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from headrace.buffer.datasets.terminal import (
    HIDDEN_TEST,
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
from headrace.buffer.tasks import EvaluatorKind

if TYPE_CHECKING:
    from pathlib import Path

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
    """Exit code of the task's check over what lies in `folder`."""
    evaluator = problem.task().evaluator
    source = evaluator.check.replace(WORKSPACE, str(folder))
    for path, text in evaluator.hidden_files.items():
        hidden = folder.parent / path.rsplit("/", 1)[1]
        hidden.write_text(text)
        source = source.replace(path, str(hidden))
    python = ["/usr/bin/python3", "-I", "-S", "-"]
    return subprocess.run(python, input=source.encode(), capture_output=True, timeout=20, check=False).returncode


def test_tasks_are_reproducible_and_distinct() -> None:
    tasks = generate(5, 320, Split.TRAIN)
    assert tasks == generate(5, 320, Split.TRAIN)
    assert tasks != generate(6, 320, Split.TRAIN)
    assert len({task.id for task in tasks}) == 320
    assert {task.family for task in tasks[:4]} == {f"terminal/{kind}" for kind in Kind}


def test_a_combination_is_the_same_task_under_every_seed() -> None:
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


def test_no_word_hides_in_another() -> None:
    """`sed /word/d` and `grep word` must hit one line only."""
    every = (*WORDS, *NAMES)
    assert not [(one, other) for one in every for other in every if one != other and one in other]


@pytest.mark.parametrize("kind", Kind)
def test_the_instruction_does_not_hold_the_finding(kind: Kind) -> None:
    assert not [problem for problem in combinations(kind) if problem.finding in problem.instruction]


@pytest.mark.parametrize("problem", ONE_OF_EACH, ids=lambda problem: problem.kind)
class TestCheck:
    def test_looking_shows_what_it_says(self, problem: Problem, tmp_path: Path) -> None:
        place(problem, tmp_path / "w")
        assert run(problem.look, tmp_path / "w").removesuffix("\n") == problem.shown

    def test_looking_in_the_wrong_place_misleads(self, problem: Problem, tmp_path: Path) -> None:
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

    def test_every_guess_fails(self, problem: Problem, tmp_path: Path) -> None:
        for number, guess in enumerate(guesses(problem)[:6]):
            folder = tmp_path / f"w{number}"
            place(problem, folder)
            run(problem.act(guess), folder)
            assert check(problem, folder) == 1, guess

    @pytest.mark.parametrize(
        "damage", ["echo x > extra", "mkdir folder", "ln -s /etc link", "for f in *; do echo x >> $f; done", "rm -f *"]
    )
    def test_damage_beside_the_solution_fails(self, problem: Problem, damage: str, tmp_path: Path) -> None:
        place(problem, tmp_path / "w")
        run(problem.act(problem.finding), tmp_path / "w")
        run(damage, tmp_path / "w")
        assert check(problem, tmp_path / "w") == 1


def test_a_repair_that_leaves_the_evaluator_early_scores_nothing(tmp_path: Path) -> None:
    problem = next(problem for problem in ONE_OF_EACH if problem.kind is Kind.REPAIR)
    place(problem, tmp_path / "w")
    (tmp_path / "w" / "calc.py").write_text("import os\nos._exit(0)\n")
    assert check(problem, tmp_path / "w") == 1


def test_the_repair_is_a_patch_whose_test_the_agent_never_saw() -> None:
    task = next(problem for problem in ONE_OF_EACH if problem.kind is Kind.REPAIR).task()
    assert task.evaluator.kind is EvaluatorKind.PATCH
    assert set(task.evaluator.hidden_files) == {HIDDEN_TEST}
    assert not set(task.evaluator.hidden_files.values()) & set(task.files.values())
