"""The bench of collapses, `scripts/bench collapse`: emulated quickstarts from the usual start, and from a bad one.

The bad start answers 95 % of the problems of one family with nothing, which is where a collapse leads: eight equal
failures have no gradient. Beside the recipe's settings run those that it had before, which collapse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benches.learner.emulated_quickstart import EmulatedRun, EmulatedShell, Emulator
from headrace.actors.run.config import resolve
from headrace.actors.run.overlays import layered
from headrace.buffer.tasks.datasets.terminal import Kind

RECIPE: Final = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml"
START: Final = Path(__file__).resolve().parents[2] / "models" / "tiny"
GOOD: Final = 0.9
INVALID: Final = 0.95
SPOILED: Final = Kind.WRITE
ADDED: Final = ("betas", "loss_weight", "loss_constant", "warmup_steps", "entropy_coef")
"""Keys of [learner] that keep the recipe from collapsing."""
BAD_START: Final = "bad_start.pt"
RATE_BEFORE: Final = 5e-4
# Torch gives every large tensor back to the system at once: two thirds of the time would go there.
_KEEP_MEMORY: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to emulate. `before` takes the settings without `ADDED`, at `RATE_BEFORE`; `spoiled`, the bad start."""

    seed: int
    before: bool
    spoiled: bool
    overrides: tuple[str, ...] = ()


def run(case: Case, folder: Path) -> EmulatedRun:
    """Emulate one run. `folder` has the bad start, if the case takes it."""
    with _emulator(case, folder) as emulator:
        if case.spoiled:
            emulator.memory.data.copy_(torch.load(folder / BAD_START))
        return emulator.run()


def spoil(case: Case, folder: Path) -> None:
    """Make the bad start, with the chance of this case's seed."""
    with _emulator(case, folder) as emulator:
        emulator.spoil(SPOILED, INVALID)
        torch.save(emulator.memory.detach(), folder / BAD_START)


@contextmanager
def _emulator(case: Case, folder: Path) -> Iterator[Emulator]:
    document = layered(RECIPE, (), case.overrides).document
    if case.before:
        learner = {key: value for key, value in document["learner"].items() if key not in ADDED}
        document["learner"] = learner | {"learning_rate": RATE_BEFORE}
    config = resolve(document, RECIPE, Path("emulated"))
    agent = config.agent.shell
    timeout_s, max_bytes = agent.command_timeout_s, agent.max_observation_bytes
    with EmulatedShell(folder / "shell.db", max_output_bytes=max_bytes, timeout_s=timeout_s) as shell:
        yield Emulator(config, START, shell, seed=case.seed)


def measure(
    folder: Path, *, runs: int, before: int, seed: int, overrides: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Emulate `runs` runs from each start, and `before` runs with the earlier settings. Returns the figures."""
    counts = {False: runs, True: before}
    cases = [
        Case(seed=seed + number, before=old, spoiled=spoiled, overrides=tuple(overrides))
        for old, count in counts.items()
        for spoiled in (False, True)
        for number in range(count)
    ]
    os.environ.update(_KEEP_MEMORY)
    found: dict[Case, EmulatedRun] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        pool.submit(spoil, cases[0], folder).result()
        for case, result in zip(cases, pool.map(run, cases, [folder] * len(cases)), strict=True):
            found[case] = result
            say(f"{case}: {result}")
    starts = {}
    for spoiled, name in ((False, "usual"), (True, f"{SPOILED} {INVALID:.0%} invalid")):
        figures = _figures([result for case, result in found.items() if case.spoiled is spoiled and not case.before])
        old = _figures([result for case, result in found.items() if case.spoiled is spoiled and case.before])
        starts[name] = figures | {f"before_{key}": value for key, value in old.items()}
    sums = {key: sum(start[key] for start in starts.values()) for key in ("below_90", "before_below_90")}
    return {"seed": seed, "runs": runs, "before_runs": before, **sums, "starts": starts}


def _figures(runs: Sequence[EmulatedRun]) -> dict[str, Any]:
    finals = sorted(result.final for result in runs)
    return {
        "below_90": sum(final < GOOD for final in finals),
        "lowest": finals[0] if finals else None,
        "median": median(finals) if finals else None,
        "base": median(result.base for result in runs) if runs else None,
        "base_invalid": median(result.invalid[SPOILED] for result in runs) if runs else None,
    }
