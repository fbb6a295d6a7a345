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

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import drive
from headrace.actors.simulation.virtual.plan import MINUTE_S, SimulationPlan
from headrace.actors.simulation.virtual.plan_service import prepare_plan, scaled
from headrace.actors.simulation.virtual.run_statistics import RunStatistics, read_statistics
from headrace.actors.simulation.virtual.simulate import run_plan

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
