"""`headrace simulate`: one plan in virtual time, beside the same plan in sync mode.

Invariants:
- A run ends with its steps done, or with an error that says what stood still: never by waiting for ever.
- The same plan gives the same history, to the last row of the ledger.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from headrace.actors.errors import ConfigError, RunStalled, first_cause
from headrace.actors.runtime.runtime import InlineRuntime
from headrace.actors.simulation.account import history_digest, read_account
from headrace.actors.simulation.plan import MINUTE_S, Mode
from headrace.actors.simulation.plan_service import open_service
from headrace.actors.simulation.virtual_time import run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.actors.simulated.engines import SimulatedEngineGroup
    from headrace.actors.simulation.account import Account
    from headrace.actors.simulation.plan import SimulationPlan

COLLECT_EVERY: Final = 50_000
"""Objects made between two collections of garbage."""
MOST_SYNC_STEPS: Final = 20
"""Enough for a mean: each step of sync mode begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One run, and what it is compared with."""

    plan: SimulationPlan
    account: Account
    engine_busy: float
    """Mean number of turns that generate."""
    sync_step_s: float
    history_sha256: str
    """Of the whole ledger."""

    @property
    def clean(self) -> bool:
        """Nothing over the bound, nothing lost, nothing trained twice."""
        return not self.problems()

    def to_json(self) -> dict[str, Any]:
        plan, account = self.plan, self.account
        return {
            "mode": plan.mode.value,
            "push": plan.push.value,
            "slots": plan.slots,
            "max_staleness": plan.max_staleness,
            "steps": plan.steps,
            "seed": plan.seed,
            "step_minutes": account.step_s / MINUTE_S,
            "ideal_minutes": plan.ideal_s / MINUTE_S,
            "fraction_of_ideal": plan.ideal_s / account.step_s,
            "sync_step_minutes": self.sync_step_s / MINUTE_S,
            "speedup_over_sync": self.sync_step_s / account.step_s,
            "max_staleness_seen": account.max_staleness,
            "staleness": {str(staleness): count for staleness, count in account.staleness.items()},
            "most_in_flight": account.most_in_flight,
            "trained": account.trained,
            "evictions": account.evicted,
            "waste": account.waste,
            "trained_share_by_decile": account.trained_shares(),
            "utilisation": self.utilisation(),
            "clean": self.clean,
            "problems": self.problems(),
            "history_sha256": self.history_sha256,
        }

    def lines(self) -> list[str]:
        """For people."""
        said = self.to_json()
        histogram = "  ".join(f"{staleness}: {count}" for staleness, count in self.account.staleness.items())
        stations = "  ".join(f"{station} {share:.0%}" for station, share in self.utilisation().items())
        shares = "  ".join("-" if share is None else f"{share:.0%}" for share in self.account.trained_shares())
        ideal = f"{said['fraction_of_ideal']:.1%} of the ideal {said['ideal_minutes']:.2f}"
        return [
            f"{said['step_minutes']:.2f} minutes a step: {ideal}",
            f"{said['speedup_over_sync']:.2f} times sync mode ({said['sync_step_minutes']:.2f} minutes a step)",
            f"largest staleness {said['max_staleness_seen']} of {self.plan.max_staleness}; by staleness  {histogram}",
            f"evicted {self.account.evicted}, wasted {self.account.waste:.1%} of the sampled time",
            f"trained by tenth of durations, shortest first  {shares}",
            f"utilisation  {stations}",
            "ledger clean" if self.clean else f"ledger NOT clean: {'; '.join(self.problems()[:3])}",
        ]

    def problems(self) -> list[str]:
        """What the ledger shows that must not be."""
        return self.account.problems_at(self.plan.max_staleness)

    def utilisation(self) -> dict[str, float]:
        """By station: the share of its places (of slots, or the one learner) that is taken in the mean."""
        busy, slots = self.account.busy, self.plan.slots
        return {
            "sandbox": sum(busy.values()) / slots,
            "agent": busy.get("agent", 0.0) / slots,
            "engine": self.engine_busy / slots,
            "evaluator": busy.get("evaluate", 0.0) / slots,
            "learner": self.account.learner_share,
        }


def simulate(plan: SimulationPlan, keep: Path | None = None) -> Simulated:
    """Run the plan, and the same in sync mode. `keep` is an empty folder for the ledger of the first. Raises
    ConfigError, TasksParked, RunStalled."""
    with tempfile.TemporaryDirectory(prefix="headrace-simulate-") as scratch:
        folder = Path(scratch) / "ledger" if keep is None else keep
        account, engine_busy = run_plan(plan, folder)
        digest = history_digest(folder)
    if plan.mode is Mode.SYNC:
        sync_step_s = account.step_s
    else:
        steps = min(plan.steps, MOST_SYNC_STEPS)
        changes = {"mode": Mode.SYNC, "steps": steps, "rule": "all", "buffer": {}}
        sync_step_s = run_plan(plan.model_copy(update=changes))[0].step_s
    return Simulated(
        plan=plan, account=account, engine_busy=engine_busy, sync_step_s=sync_step_s, history_sha256=digest
    )


def run_plan(plan: SimulationPlan, keep: Path | None = None) -> tuple[Account, float]:
    """One run in virtual time: its account, and the mean number of generating turns. `keep` is where the ledger is
    exported to."""
    with tempfile.TemporaryDirectory(prefix="headrace-simulate-") as folder:
        target = _made(keep) if keep is not None else Path(folder)
        try:
            with _rare_collections():
                engine_busy = run_virtual(_run(plan, target), seed=plan.seed)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        return read_account(target, warmup_steps=plan.warmup_steps), engine_busy


def _made(folder: Path) -> Path:
    """Raises ConfigError."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {folder}: cannot be made ({error.strerror}); name a new folder") from error
    return folder


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Garbage in larger portions: a simulation makes little of it, and most of what it holds lives to its end."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _run(plan: SimulationPlan, folder: Path) -> float:
    now = asyncio.get_running_loop().time
    async with open_service(plan, InlineRuntime(), clock=now) as service:
        try:
            await service.run()
        except RunStalled as stalled:
            advice = "a rule that cannot be met, or too few slots for a batch"
            raise RunStalled(f"simulate: {stalled}; {advice}") from stalled
        ended_s = now()
        learner = await service.learner.status()
        steps = 0 if learner.version is None else learner.version.step
        if steps <= plan.warmup_steps:
            raise ConfigError(
                f"simulate: the data is used up after {steps} of {plan.steps} steps, and {plan.warmup_steps} of them "
                "warm up: raise tasks or buffer.passes, or lower steps"
            )
        await service.replay.export(folder)
        engines = cast("SimulatedEngineGroup", service.engines)
        generated_s = sum(load.generated_s for load in (await engines.status()).loads)
    return generated_s / ended_s
