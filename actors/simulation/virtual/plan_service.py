"""Run configuration and service of a simulation plan: the ordinary actors over simulated backends.

Invariant: the configuration is the same in virtual and in real time, with the inline runtime and with Ray.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.actors.record.files.metrics import UNRECORDED, MetricsLog
from headrace.actors.run.config import RunConfig, resolve
from headrace.actors.run.parts import Externals
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import Runtime
from headrace.actors.simulation.virtual.plan import SimulationPlan

CHECK_INTERVAL_S = 600.0
"""Interval of the supervision's checks in virtual time; one check a second would cost more than the run."""

EVALUATED_INTERVAL_S = 10.0
"""The same with evaluations, which begin at a check."""


def plan_config(plan: SimulationPlan, run_dir: Path, **tables: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run of this plan in `run_dir`, with `tables` in place of the plan's. Raises
    ConfigError."""
    dispatcher, sandbox = plan.dispatcher_config(), plan.sandbox_section()
    # All rollouts in flight have sandboxes, because `SimulationPlan.sandbox_section` allows twice the slots.
    evaluation_slots = max(1, min(dispatcher.evaluation_slots, plan.slots - plan.workers))
    heldout = plan.heldout if plan.evaluate_every else 1
    document: dict[str, Any] = {
        "agent": {"kind": "simulated", "simulated": plan.agent_config().model_dump()},
        "tasks": {"train_count": plan.tasks, "heldout_count": heldout, "evaluate_s": plan.evaluate_s},
        "rollout": plan.rollout_config().model_dump(),
        "dispatcher": dispatcher.model_dump() | {"evaluation_slots": evaluation_slots},
        "sandbox": sandbox.model_dump(),
        "buffer": plan.buffer_config().model_dump(),
        "engines": {"backend": "simulated", "simulated": plan.engines_config().model_dump()},
        "learner": {"kind": "simulated", "simulated": plan.learner_config().model_dump()},
        "training": plan.loop_config().model_dump(exclude_unset=True),
        "evaluation": {"tasks": heldout, "samples": 1, "every_steps": plan.evaluate_every},
        "service": {"seed": plan.seed, "workers": plan.workers},
    }
    config = resolve(document | tables, Path("the plan"), run_dir)
    # The pool of a plan also sets what a recipe has no keys for, such as its concurrent kills.
    return config if "sandbox" in tables else config.model_copy(update={"sandbox": sandbox})


@asynccontextmanager
async def open_service(
    plan: SimulationPlan,
    runtime: Runtime,
    *,
    clock: Callable[[], float] = time.time,
    metrics: MetricsLog = UNRECORDED,
) -> AsyncIterator[Service]:
    """Start the service of a plan in the caller's process, with its ledger in memory. Raises ConfigError."""
    externals = Externals(
        clock=clock,
        tasks=plan.task_set(),
        heldout=plan.heldout_set(),
        check_interval_s=EVALUATED_INTERVAL_S if plan.evaluate_every else CHECK_INTERVAL_S,
        metrics=metrics,
    )
    async with Service(plan_config(plan, Path("in memory")), None, runtime, externals=externals) as service:
        yield service
