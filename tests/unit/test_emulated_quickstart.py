"""The emulator of the quickstart's learning, for a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benches.learner.collapse import RECIPE, START
from benches.learner.emulated_quickstart import EmulatedShell, Emulator, solves

from headrace.actors.run.overlays import load_layered
from headrace.buffer.tasks.datasets.terminal import Kind, Split, problems

TASKS = ("tasks.train_count=64", "tasks.heldout_count=16", "evaluation.tasks=16", "evaluation.samples=2")
SMALL = (*TASKS, "training.steps=1", "buffer.batch_size=16")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[EmulatedShell]:
    with EmulatedShell(tmp_path / "shell.db", max_output_bytes=48, timeout_s=10) as shell:
        yield shell


def emulator(shell: EmulatedShell, *, seed: int) -> Emulator:
    return Emulator(load_layered(RECIPE, (), SMALL, Path("emulated")), START, shell, seed=seed)


@pytest.mark.parametrize("kind", list(Kind))
def test_looking_and_acting_solves_a_problem_and_a_guess_does_not(shell: EmulatedShell, kind: Kind) -> None:
    problem = next(one for one in problems(0, 16, Split.TRAIN) if one.kind is kind)
    looked = shell.run(problem.files(), problem.look)
    assert looked.output.startswith(problem.shown[:48])
    assert looked.files == problem.files()
    assert solves(problem, shell.run(looked.files, problem.act(problem.finding)).files)
    assert not solves(problem, shell.run(looked.files, problem.act(problem.stray[2])).files)


def test_a_run_depends_on_its_seed_alone_and_moves_the_weights(shell: EmulatedShell) -> None:
    first = emulator(shell, seed=3)
    before = first.memory.detach().clone()
    found = first.run()
    assert not torch.equal(before, first.memory)
    assert found.families.keys() == {str(kind) for kind in Kind}
    again, other = emulator(shell, seed=3), emulator(shell, seed=4)
    assert again.run() == found
    assert torch.equal(again.memory, first.memory)
    other.run()
    assert not torch.equal(other.memory, first.memory)


def test_a_spoiled_start_answers_one_family_with_nothing(shell: EmulatedShell) -> None:
    spoiled = emulator(shell, seed=5)
    _, before, _ = spoiled.evaluate()
    spoiled.spoil(Kind.WRITE, 0.95, steps=40, batch=8)
    _, after, success = spoiled.evaluate()
    assert before["write"] < 0.7 < after["write"]
    assert after["move"] < 0.3
    assert success["move"] > 0
