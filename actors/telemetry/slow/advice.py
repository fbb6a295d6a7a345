"""The advice for each cause: what to change, by the slow part and the kind of factor that slow rollouts share.

Invariant: every recipe key that a line names is in docs/configuration.md (a test compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.actors.telemetry.slow.rows import DISPATCH, EARLIER_ATTEMPTS, STALENESS_WAIT
from headrace.buffer.trajectories.breakdown import (
    BEFORE_AGENT,
    BOOT,
    EVALUATE_BOOT,
    EVALUATE_QUEUE,
    QUEUE,
    SERVICE,
    TOOL,
)

DRAIN: Final = "drain this host (`headrace node drain`), and look at its disk, memory and neighbours"
BY_FACTOR: Final[Mapping[tuple[str, str], str]] = {
    ("boot", "evaluation"): "lower `sandbox.pool.held_out_share` or `dispatcher.evaluation_slots`",
    ("engine", "evaluation"): "lower `dispatcher.evaluation_slots`, or raise `evaluation.every_steps`",
    ("boot", "image"): "keep sandboxes of this image warm (`sandbox.pool.warm`), or make the image smaller",
    ("boot", "boot_tries"): "lower `sandbox.pool.boots_per_s` or `sandbox.pool.boot_concurrency`: boots are retried",
    ("engine", "engines"): "replace this engine (`headrace engine remove`), or look at its host",
    ("engine", "push"): "lower `push.wave_size`, so that more engines serve during a push",
    ("engine", "quarantine"): "look at the engines that were taken out of routing (`headrace status RUN --engines`)",
    ("engine", "retractions"): "lower `engines.max_running`: the engines run out of cache and compute turns again",
    ("engine", "prompt_tokens"): "lower `sampling.max_context_tokens`",
    ("engine", "sampled_tokens"): "lower `sampling.max_tokens_per_turn`",
    ("tool", "task"): "park or repair this task: its tools take long (`headrace data check`)",
    ("tool", "starved"): "raise `sandbox.local.cpus` or lower `sandbox.pool.max_live`: its sandboxes wait for a CPU",
    ("evaluate", "image"): "make the image smaller or quicker to start: clean sandboxes boot it, too",
    ("evaluate", "task"): "shorten this task's check, or remove the task (`headrace data check`)",
}
"""Lines by stage and kind of factor; these come first."""
BY_KIND: Final[Mapping[str, str]] = {
    "host": DRAIN,
    "node": DRAIN,
    "worker": "look at this worker's log (`headrace logs`); lower `dispatcher.slots_per_worker` if its host is busy",
    "failed_on": DRAIN,
    "checkpoint": "save less often (`training.save_every`), or put checkpoints on a faster disk",
    "restart": "see why the learner was restarted (`headrace logs`)",
    "outage": "see why the engines or the system failed (`headrace status`)",
    "gateway": "look at this gateway's process and host (`headrace logs`); it renders and records for its sessions",
    "window": "see what the run and its hosts did then (`headrace logs`); what is over needs no setting",
    "after": "something changed then, for good: see `headrace logs`, and compare steps by `headrace trace show`",
}
"""Lines by kind of factor, whatever the stage."""
BY_STAGE: Final[Mapping[str, str]] = {
    "boot": "raise `sandbox.pool.boot_concurrency` or `sandbox.pool.max_live`, or lower `dispatcher.slots_per_worker`",
    "prepare": "make the task's files smaller, or put them into its image",
    "gate": "lower `push.wave_size`, or add an engine (`headrace engine add`)",
    "engine": "add an engine (`headrace engine add`), or lower `dispatcher.slots_per_worker`",
    "tool": "lower the agent's time limit of a command, e.g. `agent.program.max_turns` or `rollout.agent_timeout_s`",
    "service": "raise `services.NAME.max_concurrency`, or give the service more capacity",
    "agent": "let groups go on without stragglers: `headrace tune` finds the rule",
    "evaluate": "raise `sandbox.pool.evaluation_reserve`, or shorten the checks",
    "dispatch": "see whether the workers or the buffer were away (`headrace logs`)",
    "retries": "see why attempts failed (`headrace report`); tasks are parked after `buffer.park_after` failures",
    "staleness": "raise `buffer.max_staleness`, or let `headrace tune` find the bound",
    "gateway": "give the gateway's host more processors: rendering and recording use them",
    "other": "see the rollout's spans for what its worker did meanwhile",
}


OVERLOADED: Final = 2.0
"""One-minute load of a host per CPU above which more work at once only makes it worse."""
RELIEF: Final = "lower `dispatcher.slots_per_worker`, or add a host: the hosts have more work than CPUs"
"""Advice for an overloaded host in place of that of `RAISING` stages."""
RAISING: Final = ("boot", "evaluate", "service")


def stage_of(part: str) -> str:
    """Return the stage that a part belongs to, a key of `BY_STAGE`."""
    if part in (QUEUE, BOOT):
        return "boot"
    if part in (EVALUATE_QUEUE, EVALUATE_BOOT) or part.startswith("evaluate"):
        return "evaluate"
    if part in BEFORE_AGENT:
        return "prepare"
    if part.startswith(TOOL):
        return "tool"
    if part.startswith(SERVICE):
        return "service"
    if part.startswith("engine"):
        return "engine"
    named = {
        EARLIER_ATTEMPTS: "retries",
        STALENESS_WAIT: "staleness",
        DISPATCH: "dispatch",
        "offer": "dispatch",
        "gate": "gate",
        "own": "agent",
        "agent": "agent",
        "running": "agent",
        "render": "gateway",
        "record": "gateway",
    }
    return named.get(part, "other")


def advise(part: str, factor: str | None, *, overloaded: bool = False) -> str:
    """Return one line for a part and the kind of factor. With `overloaded` hosts none that adds to their load."""
    stage = stage_of(part)
    if factor is not None and (found := BY_FACTOR.get((stage, factor)) or BY_KIND.get(factor)):
        return found
    return RELIEF if overloaded and stage in RAISING else BY_STAGE[stage]
