"""`scripts/bench replay`: a plan at scaled time through the real service over Ray, beside the same in virtual time.

Invariants:
- Both run the same plan: the same seed, and durations scaled by the same factor. What differs is that calls, disk and
  processor take time in one of them.
- Both are read from their ledgers in the same way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.record.run_directory import RunDirectory
from headrace.actors.run.launch import drive
from headrace.actors.simulation.account import read_account
from headrace.actors.simulation.plan import MINUTE_S
from headrace.actors.simulation.plan_service import prepare_plan, scaled
from headrace.actors.simulation.simulate import run_plan

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.simulation.account import Account
    from headrace.actors.simulation.plan import SimulationPlan

AGREEMENT: Final = 0.05
"""How far the two may lie apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One plan, run twice. `minute_s` is the real time of a simulated minute, `wall_s` that of the whole real run."""

    plan: SimulationPlan
    minute_s: float
    real: Account
    virtual: Account
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
        """What the ledger of the real run shows that must not be."""
        return self.real.problems_at(self.plan.max_staleness)

    def _side(self, account: Account) -> dict[str, Any]:
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
    """Run the plan in real time, a simulated minute in `minute_s`, and in virtual time. Raises ConfigError and what
    ends a run."""
    real_plan = scaled(plan, minute_s / MINUTE_S)
    directory = RunDirectory(path=folder / "replay")
    config = prepare_plan(real_plan, directory)
    started_s = time.monotonic()
    drive(config, directory, quiet=quiet)
    return compare(plan, directory, minute_s=minute_s, wall_s=time.monotonic() - started_s)


def compare(plan: SimulationPlan, directory: RunDirectory, *, minute_s: float, wall_s: float) -> Replayed:
    """A run of the scaled plan that has ended, beside the same in virtual time. Raises LedgerRefused."""
    virtual, _ = run_plan(scaled(plan, minute_s / MINUTE_S))
    real = read_account(directory.path, warmup_steps=plan.warmup_steps)
    return Replayed(plan=plan, minute_s=minute_s, real=real, virtual=virtual, wall_s=wall_s)
