"""The bench of the simulation, `scripts/bench replay`: a plan in scaled time over Ray, and the same plan in virtual
time.

Invariants:
- Both run the same plan, with the same seed, and durations scaled by the same factor. Only in real time do calls, the
  disk and the processor take time.
- The figures of both are read from their ledgers by the same code.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import drive, lay_out
from headrace.actors.simulation.virtual.plan import MINUTE_S, SimulationPlan
from headrace.actors.simulation.virtual.plan_service import plan_config
from headrace.actors.simulation.virtual.run_statistics import RunStatistics, read_statistics
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.primitives.slowdowns import SlowKind

AGREEMENT: Final = 0.05
"""Largest relative difference at which real and virtual time still agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of running a plan twice. `minute_s` is the real duration of a simulated minute, `wall_s` that of the whole
    real run."""

    plan: SimulationPlan
    minute_s: float
    real: RunStatistics
    virtual: RunStatistics
    wall_s: float

    @property
    def real_over_virtual(self) -> float:
        return self.real.step_s / self.virtual.step_s

    @property
    def agrees(self) -> bool:
        return abs(self.real_over_virtual - 1) <= AGREEMENT

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "slots": plan.slots,
            "max_staleness": plan.max_staleness,
            "mode": plan.mode.value,
            "steps": plan.steps,
            "measured_steps": plan.steps - plan.warmup_steps,
            "seed": plan.seed,
            "seconds_per_minute": self.minute_s,
            "ideal_minutes": plan.ideal_s / MINUTE_S,
            "real": self._side(self.real),
            "virtual": self._side(self.virtual),
            "real_over_virtual": self.real_over_virtual,
            "agrees": self.agrees,
            "wall_s": self.wall_s,
            "problems": self.problems(),
        }

    def problems(self) -> list[str]:
        """Return the problems in the ledger of the real run."""
        return self.real.problems_at(self.plan.max_staleness)

    def _side(self, account: RunStatistics) -> dict[str, Any]:
        step_minutes = account.step_s / self.minute_s
        return {
            "step_s": account.step_s,
            "step_minutes": step_minutes,
            "fraction_of_ideal": self.plan.ideal_s / MINUTE_S / step_minutes,
            "max_staleness_seen": account.max_staleness,
            "staleness": {str(staleness): count for staleness, count in account.staleness.items()},
            "evictions": account.evicted,
            "waste": account.waste,
        }


def replay(plan: SimulationPlan, folder: Path, *, minute_s: float, quiet: bool = False) -> Replayed:
    """Run the plan in real time, where a simulated minute takes `minute_s`, and in virtual time. Raises ConfigError and
    the errors that end a run."""
    real_plan = scaled(plan, minute_s / MINUTE_S)
    directory = RunDirectory(path=folder / "replay")
    config = prepare_plan(real_plan, directory)
    started_s = time.monotonic()
    drive(config, directory, quiet=quiet)
    return compare(plan, directory, minute_s=minute_s, wall_s=time.monotonic() - started_s)


def compare(plan: SimulationPlan, directory: RunDirectory, *, minute_s: float, wall_s: float) -> Replayed:
    """Compare a completed run of the scaled plan with the same plan in virtual time. Raises LedgerRefused."""
    virtual, _ = run_plan(scaled(plan, minute_s / MINUTE_S))
    real = read_statistics(directory.path, warmup_steps=plan.warmup_steps)
    return Replayed(plan=plan, minute_s=minute_s, real=real, virtual=virtual, wall_s=wall_s)


def scaled(plan: SimulationPlan, factor: float) -> SimulationPlan:
    """Return the plan with every duration multiplied by `factor`."""
    durations = plan.durations
    changes = {
        "mean_s": durations.mean_s * factor,
        "median_s": durations.median_s * factor,
        "cap_s": durations.cap_s * factor,
        "recorded_s": tuple(duration_s * factor for duration_s in durations.recorded_s),
    }
    return plan.model_copy(
        update={
            "durations": durations.model_copy(update=changes),
            "learner_s": plan.learner_s * factor,
            "push_s": plan.push_s * factor,
            "boot_s": plan.boot_s * factor,
            "evaluate_s": plan.evaluate_s * factor,
        }
    )


def prepare_plan(plan: SimulationPlan, directory: RunDirectory) -> RunConfig:
    """Create the run directory of the plan, and return its configuration. One held-out rollout is evaluated before the
    first step and one after the last. Raises ConfigError, including for what a recipe cannot express: `chances`,
    `images` and slow evaluators."""
    if plan.chances:
        raise ConfigError("chances: not supported in real time, where each task draws its own; remove the key")
    if plan.images > 1 or any(slowdown.kind is SlowKind.EVALUATOR for slowdown in plan.slowdowns):
        raise ConfigError("images and slowdowns of kind evaluator: not supported in real time; remove the keys")
    config = plan_config(plan, directory.path)
    lay_out(config, directory)
    return config
