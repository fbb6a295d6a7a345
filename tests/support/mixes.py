"""Runs of several sources of tasks in virtual time: the ordinary service over simulated backends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.actors.errors import first_cause
from headrace.actors.run.config import RunConfig
from headrace.actors.run.parts import Externals
from headrace.actors.run.service import Service
from headrace.actors.run.task_sets import load_task_sets
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.plan_service import plan_config
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.audit.evidence import Evidence, read_evidence
from headrace.buffer.core.source_names import source_name

CHECK_S = 100.0
PLAN = SimulationPlan(
    slots=8, batch_size=16, group_size=4, max_staleness=4, steps=50, learner_s=2.0, push_s=0.2, turns=1
)


def source(name: str, share: float, mean_s: float, **tables: Any) -> dict[str, Any]:
    """A source of simulated tasks whose agents take about `mean_s`."""
    durations = {"mean_s": mean_s, "median_s": 0.99 * mean_s, "cap_s": 2 * mean_s}
    simulated = {"durations": durations} | tables.pop("simulated", {})
    return {"name": name, "share": share, "train_count": 40, "agent": {"simulated": simulated}, **tables}


def mix_config(sources: Sequence[dict[str, Any]], plan: SimulationPlan = PLAN, **tables: dict[str, Any]) -> RunConfig:
    """The configuration of a plan with these sources; `tables` replace the plan's. Raises ConfigError."""
    return plan_config(plan, Path("in memory"), tasks={"sources": list(sources)}, **tables)


def run_mix(config: RunConfig, folder: Path) -> Evidence:
    """Run to the end in virtual time, and export the ledger to `folder`, whatever the end. Raises its error."""

    async def run() -> None:
        externals = Externals(
            clock=asyncio.get_running_loop().time, tasks=load_task_sets(config)[0], check_interval_s=CHECK_S
        )
        async with Service(config, None, InlineRuntime(), externals=externals) as service:
            try:
                await service.run()
            finally:
                await service.actors.replay.export(folder)

    folder.mkdir()
    try:
        run_virtual(run(), seed=config.service.seed)
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return read_evidence(folder)


def trained_by_step(evidence: Evidence) -> list[dict[str, int]]:
    """Number of rollouts of each source in the batch of each surviving step."""
    tasks = {group.group_id: group.task_id for group in evidence.groups}
    sources = {rollout.rollout_id: source_name(tasks[rollout.group_id]) for rollout in evidence.rollouts}
    batches = {batch.batch_id: batch for batch in evidence.batches}
    steps = []
    for commit in evidence.surviving:
        members = [sources[member.rollout_id] for member in batches[commit.batch_id].members]
        steps.append({name: members.count(name) for name in evidence.sources})
    return steps
