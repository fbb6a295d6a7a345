"""Simulation of a plan in virtual time for `headrace simulate`, compared with the same plan in sync mode.

Invariants:
- A run ends with all steps done, or with an error that says what made no progress; it never waits forever.
- The same plan gives the same history, down to the last row of the ledger.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import orjson

from headrace.actors.errors import ConfigError, RunStalled, first_cause
from headrace.actors.record.files.metrics import MetricsLog
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.simulation.virtual.plan import MINUTE_S, Mode, SimulationPlan
from headrace.actors.simulation.virtual.plan_service import open_service
from headrace.actors.simulation.virtual.run_statistics import RunStatistics, history_digest, read_statistics
from headrace.actors.simulation.virtual.virtual_time import run_virtual

COLLECT_EVERY: Final = 50_000
"""Number of allocations between two garbage collections."""
MOST_SYNC_STEPS: Final = 20
"""Maximum number of steps in sync mode, enough for a mean because its steps are independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Statistics of one run, and the step time of the same plan in sync mode."""

    plan: SimulationPlan
    account: RunStatistics
    engine_busy: float
    """Mean number of turns that are being generated."""
    sync_step_s: float
    history_sha256: str
    """Digest of the whole ledger."""

    @property
    def clean(self) -> bool:
        """True if no rollout exceeded the bound, was lost or was trained twice."""
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
        """Render the result for the terminal."""
        document = self.to_json()
        histogram = "  ".join(f"{staleness}: {count}" for staleness, count in self.account.staleness.items())
        stations = "  ".join(f"{station} {share:.0%}" for station, share in self.utilisation().items())
        shares = "  ".join("-" if share is None else f"{share:.0%}" for share in self.account.trained_shares())
        ideal = f"{document['fraction_of_ideal']:.1%} of the ideal {document['ideal_minutes']:.2f}"
        sync = f"{document['sync_step_minutes']:.2f} minutes a step"
        seen = document["max_staleness_seen"]
        return [
            f"{document['step_minutes']:.2f} minutes a step: {ideal}",
            f"{document['speedup_over_sync']:.2f} times sync mode ({sync})",
            f"largest staleness {seen} of {self.plan.max_staleness}; by staleness  {histogram}",
            f"evicted {self.account.evicted}, wasted {self.account.waste:.1%} of the sampled time",
            f"trained by tenth of durations, shortest first  {shares}",
            f"utilisation  {stations}",
            "ledger clean" if self.clean else f"ledger NOT clean: {'; '.join(self.problems()[:3])}",
        ]

    def problems(self) -> list[str]:
        """Return the violated invariants of the ledger."""
        return self.account.problems_at(self.plan.max_staleness)

    def utilisation(self) -> dict[str, float]:
        """Return the mean share of each station's capacity (the slots, or the one learner) that is in use."""
        busy, slots = self.account.busy, self.plan.slots
        return {
            "sandbox": sum(busy.values()) / slots,
            "agent": busy.get("agent", 0.0) / slots,
            "engine": self.engine_busy / slots,
            "evaluator": busy.get("evaluate", 0.0) / slots,
            "learner": self.account.learner_share,
        }


def simulate(plan: SimulationPlan, keep: Path | None = None) -> SimulationResult:
    """Run the plan, and the same plan in sync mode. `keep` is a new folder for the ledger of the first run. Raises
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
    return SimulationResult(
        plan=plan, account=account, engine_busy=engine_busy, sync_step_s=sync_step_s, history_sha256=digest
    )


def run_plan(plan: SimulationPlan, keep: Path | None = None) -> tuple[RunStatistics, float]:
    """Run the plan in virtual time, write its ledger and metrics to `keep`, and return its statistics and the mean
    number of turns that are being generated."""
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--keep {keep}: cannot be created ({error.strerror}); name a new folder") from error
    before = gc.get_threshold()
    with tempfile.TemporaryDirectory(prefix="headrace-simulate-") as folder:
        target = Path(folder) if keep is None else keep
        # Most objects of a simulation live until its end, so frequent collections would find little garbage.
        gc.set_threshold(COLLECT_EVERY, *before[1:])
        try:
            engine_busy = run_virtual(_run(plan, target), seed=plan.seed)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            gc.set_threshold(*before)
        return read_statistics(target, warmup_steps=plan.warmup_steps), engine_busy


class VirtualMetrics(MetricsLog):
    """Metrics file of a run in virtual time, whose records have the times of its ledger."""

    def write(self, lines: Sequence[bytes]) -> None:
        now_s = asyncio.get_running_loop().time()
        super().write([orjson.dumps(orjson.loads(line) | {"time_s": now_s}) + b"\n" for line in lines])


async def _run(plan: SimulationPlan, folder: Path) -> float:
    now = asyncio.get_running_loop().time
    metrics = VirtualMetrics(folder / "metrics.jsonl")
    async with open_service(plan, InlineRuntime(), clock=now, metrics=metrics) as service:
        try:
            await service.run()
        except RunStalled as stalled:
            advice = "check for a rule that cannot be met, or too few slots for a batch"
            raise RunStalled(f"simulate: {stalled}; {advice}") from stalled
        ended_s = now()
        learner = await service.actors.learner.status()
        steps = 0 if learner.version is None else learner.version.step
        if steps <= plan.warmup_steps:
            raise ConfigError(
                f"simulate: the data is used up after {steps} of {plan.steps} steps, of which {plan.warmup_steps} are "
                "the warm-up: raise tasks or buffer.passes, or lower steps"
            )
        await service.actors.replay.export(folder)
        engines = cast("SimulatedEngineGroup", service.actors.engines)
        generated_s = sum(load.generated_s for load in (await engines.status()).loads)
    return generated_s / ended_s
