"""Runs a published system's recipe and its control, in which rewards are shuffled over the batch."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.actors.run.launch import RunRequest, drive, prepare
from headrace.actors.run.summary import RunSummary

SCRIPTS = Path(__file__).resolve().parents[1]
NAMES = tuple(sorted(path.stem for path in (SCRIPTS / "recipes").glob("*.toml")))
BASE_RANGE = (0.05, 0.4)
"""Range of the starting policy's success, so that there is something to learn, and rewards to learn from."""
CONTROL_MARGIN = 0.05
"""The control's final success may exceed the base by this, for chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFigures:
    """Figures of a recipe and its control. Success is the share of sampled held-out answers that solve their task.
    `policy` is `trained` because the weights of the run gave them. `problems` are those of both ledgers and everything
    that went wrong in the runs; `misses` are the bounds that the figures do not keep."""

    recipe: str
    seed: int
    base_success: float | None
    final_success: float | None
    control_success: float | None
    steps: int
    answers: int
    minutes: float
    policy: str = "trained"
    rollouts: int = 0
    infra_answers: int = 0
    problems: tuple[str, ...] = ()
    misses: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(name: str, folder: Path, *, seed: int, control: bool, overrides: tuple[str, ...] = ()) -> RecipeFigures:
    """Run a recipe on the CPUs of this machine, then its control unless `control` is false."""
    began_s = time.monotonic()
    run = _run(name, folder / "run", seed, overrides)
    shuffled = None
    if control:
        quiet = ("training.rewards=shuffled", "evaluation.every_steps=0")
        shuffled = _run(name, folder / "control", seed, (*overrides, *quiet))
    runs = [run] if shuffled is None else [run, shuffled]
    problems = [problem for one in runs for problem in one.problems]
    problems += [f"{one.run} did not complete" for one in runs if not one.completed]
    problems += [f"{one.lost} rollouts were lost" for one in runs if one.lost]
    problems += [f"{one.trained_twice} rollouts were trained twice" for one in runs if one.trained_twice]
    problems += [f"{one.sandboxes_leaked} sandboxes were leaked" for one in runs if one.sandboxes_leaked]
    control_success = None if shuffled is None else shuffled.final_success
    return RecipeFigures(
        recipe=name,
        seed=seed,
        base_success=run.base_success,
        final_success=run.final_success,
        control_success=control_success,
        steps=run.steps,
        answers=run.evaluation_answers,
        minutes=(time.monotonic() - began_s) / 60,
        rollouts=run.rollouts,
        infra_answers=sum(one.evaluation_infra for one in runs),
        problems=tuple(problems),
        misses=misses(run.base_success, run.final_success, control_success),
    )


def misses(base: float | None, final: float | None, control: float | None) -> tuple[str, ...]:
    """Return the bounds that these success rates do not keep; a control of None was not run."""
    if base is None or final is None:
        return ("an evaluation did not run",)
    found = []
    low, high = BASE_RANGE
    if not low <= base <= high:
        found.append(f"base_success {base:.3f} is outside {low} to {high}")
    if final < (needed := max(2 * base, base + 0.15)):
        found.append(f"final_success {final:.3f} is below {needed:.3f}")
    if control is not None and control > base + CONTROL_MARGIN:
        found.append(f"control_success {control:.3f} is above {base + CONTROL_MARGIN:.3f}")
    return tuple(found)


def _run(name: str, runs_dir: Path, seed: int, overrides: tuple[str, ...]) -> RunSummary:
    request = RunRequest(
        recipe=SCRIPTS / "recipes" / f"{name}.toml",
        runs_dir=runs_dir,
        name=f"{name}-{seed}",
        overrides=(*overrides, f"service.seed={seed}"),
        on=(SCRIPTS / "machines" / "cpu.toml",),
    )
    return drive(*prepare(request))
