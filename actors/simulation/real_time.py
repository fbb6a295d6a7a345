"""A plan as an ordinary run: the real service over Ray, its ledger on disk, in real time.

Invariant: every config that `stage` gives an actor in virtual time is given here too, so that a plan means the same in
both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import resolve
from headrace.actors.run.launch import lay_out

if TYPE_CHECKING:
    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig
    from headrace.actors.simulation.plan import SimulationPlan


def scaled(plan: SimulationPlan, factor: float) -> SimulationPlan:
    """The same plan with every duration times `factor`."""
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
    """The run directory of the plan, and its configuration. One held-out rollout is evaluated before the first step and
    one after the last. Raises ConfigError, also for `chances`: a recipe has no place for them."""
    if plan.chances:
        raise ConfigError("chances: tasks of a recipe draw their own; leave them out to run the plan in real time")
    config = resolve(_document(plan), Path("the plan"), directory.path)
    lay_out(config, directory)
    return config


def _document(plan: SimulationPlan) -> dict[str, Any]:
    """What a recipe of this plan would say."""
    return {
        "agent": {"kind": "simulated", "simulated": plan.agent_config().model_dump()},
        "tasks": {"train_count": plan.tasks, "heldout_count": 1, "evaluate_s": plan.evaluate_s},
        "rollout": plan.rollout_config().model_dump(),
        "dispatcher": plan.dispatcher_config().model_dump() | {"evaluation_slots": 1},
        "sandbox": plan.sandbox_section().model_dump(),
        "buffer": plan.buffer_config().model_dump(),
        "engines": {"backend": "simulated", "simulated": plan.engines_config().model_dump()},
        "learner": {"kind": "simulated", "simulated": plan.learner_config().model_dump()},
        "training": plan.loop_config().model_dump(),
        "evaluation": {"tasks": 1, "samples": 1, "every_steps": 0},
        "service": {"seed": plan.seed, "workers": plan.workers},
    }
