"""The reader that turns a run directory, or a ledger from `headrace simulate --keep`, into a `Recording`.

Invariants:
- All data comes from the run's ledger, metrics and configuration; nothing is changed.
- The run's waiting times (for sandboxes, slots, the learner) are not part of a duration, since the simulation has its
  own waiting times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import reopen
from headrace.actors.simulation.tuning.records import AttemptDuration, Recording
from headrace.actors.simulation.virtual.plan import MOST_WARMUP_STEPS
from headrace.actors.simulation.virtual.run_statistics import most_in_flight
from headrace.buffer.audit.evidence import Evidence, read_evidence
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.simulated.provider import SimulationConfig

BEFORE: Final = ("boot", "prepare")
"""Phases before the agent phase, excluding the wait for a sandbox."""
_PLANNED: Final = frozenset(
    {"batch_size", "group_size", "max_staleness", "rule", "unfinished", "mode", "max_in_flight", "passes"}
)
"""Keys of [buffer] that a candidate sets, or that a simulation does not use."""


def read_run(path: Path) -> Recording:
    """Read the recording of a run. Raises ConfigError, RunMissing, LedgerRefused."""
    evidence = read_evidence(path)
    if not evidence.commits:
        raise ConfigError(
            f"{path}: the run has not finished a step yet, so there is no step time to compare with; "
            "let it run for a few steps"
        )
    directory = RunDirectory(path=path)
    config = reopen(path)[0] if directory.config.is_file() else None
    metrics = read_metrics(directory.metrics)
    # Times between commits within an epoch, without the warm-up.
    commits = evidence.surviving
    timed = [
        later.committed_at_s - earlier.committed_at_s
        for earlier, later in pairwise(commits[min(MOST_WARMUP_STEPS, len(commits) // 2) :])
        if earlier.epoch == later.epoch
    ]
    settings = _sizes(evidence) if config is None else _configured(config, directory)
    overheads = _overheads(evidence)
    # The time of the learner's own work in a step, without its waits.
    steps = [float(record["step_s"]) for record in metrics if record.get("kind") == "step" and "step_s" in record]
    steps = steps or [commit.metrics["learner_s"] for commit in evidence.commits if "learner_s" in commit.metrics]
    if steps := steps or timed:
        settings["learner_s"] = fmean(steps)
    settings |= overheads
    if pushes := [float(record["total_s"]) for record in metrics if record.get("kind") == "push"]:
        settings["push_s"] = fmean(pushes)
    ends = Counter(attempt.cause for attempt in evidence.attempts if attempt.offered)
    scored = sum(1 for attempt in evidence.attempts if attempt.reward is not None)
    pool = None if config is None else config.sandbox.pool
    reserved = 0 if config is None else config.dispatcher.evaluation_slots
    return Recording(
        source=str(path),
        observations=tuple(_observations(evidence, before_s=overheads.get("boot_s", 0.0))),
        settings=settings,
        cap_s=math.inf if config is None else config.rollout.agent_timeout_s,
        failure=ends[Cause.INFRA] / max(1, scored + ends[Cause.INFRA]),
        step_s=fmean(timed) if timed else None,
        workers=1 if config is None else config.service.workers,
        capped=config is not None and config.buffer.max_in_flight is not None,
        sandboxes=None if pool is None else pool.max_live - pool.evaluation_reserve - reserved,
    )


def _configured(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    buffer, tasks = config.buffer, directory.train_tasks
    slots = config.dispatcher.slots_per_worker * config.service.workers
    return {
        "slots": slots if buffer.max_in_flight is None else min(slots, buffer.max_in_flight),
        "batch_size": buffer.batch_size,
        "group_size": buffer.group_size,
        "max_staleness": buffer.max_staleness,
        "rule": buffer.rule,
        "mode": buffer.mode,
        "tasks": max(1, len(tasks.read_bytes().splitlines())) if tasks.is_file() else 512,
        "push": config.engines.simulated.push if config.engines.is_simulated else "overlap",
        "buffer": {
            key: value
            for key, value in buffer.model_dump(mode="json", exclude_defaults=True).items()
            if key not in _PLANNED - {"unfinished"}
        },
    }


def _sizes(evidence: Evidence) -> dict[str, Any]:
    """Return a run's settings, as far as its ledger shows them."""
    members = Counter(rollout.group_id for rollout in evidence.rollouts)
    rules = Counter(group.rule for group in evidence.groups if group.rule)
    return {
        "slots": most_in_flight(evidence),
        "batch_size": max(len(batch.members) for batch in evidence.batches),
        "group_size": max(2, *members.values()),
        "max_staleness": evidence.commits[-1].max_staleness,
        "rule": rules.most_common(1)[0][0] if rules else "all",
        "mode": "async",
        "tasks": max(1, len(evidence.tasks)),
    }


def _overheads(evidence: Evidence) -> dict[str, float]:
    """Return the mean times before and after the agent phase; the latter includes time outside of any phase."""
    before_s, after_s = [], []
    for attempt in evidence.attempts:
        if attempt.reward is None or attempt.ended_at_s is None:
            continue
        phases = Counter[str]()
        for phase, seconds in attempt.phases_s:
            phases[phase] += seconds  # type: ignore[assignment]
        before_s.append(sum(phases[phase] for phase in BEFORE))
        outside_s = attempt.ended_at_s - attempt.issued_at_s - sum(phases.values())
        waited_s = sum(seconds for phase, seconds in phases.items() if phase.startswith("service."))
        evaluated_s = phases["evaluate"] + waited_s + phases["agent"] - working_s(attempt.phases_s)
        after_s.append(evaluated_s + max(0.0, outside_s))
    if not before_s:
        return {}
    # The median of simulated boots, which are lognormal.
    spread = math.exp(SimulationConfig().boot_sigma ** 2 / 2)
    return {"boot_s": max(1e-3, fmean(before_s) / spread), "evaluate_s": fmean(after_s)}


def working_s(phases_s: Sequence[tuple[str, float]]) -> float:
    """Return the seconds of an agent's work from the phases of its rollout, in order. Its waits for services belong to
    it; services after its last phase were called by the evaluator."""
    end = max((place for place, (phase, _) in enumerate(phases_s) if phase == "agent"), default=-1) + 1
    return sum(seconds for phase, seconds in phases_s[:end] if phase == "agent" or phase.startswith("service."))


def _observations(evidence: Evidence, *, before_s: float) -> Iterator[AttemptDuration]:
    tasks = {group.group_id: group.task_id for group in evidence.groups}
    groups = {rollout.rollout_id: rollout.group_id for rollout in evidence.rollouts}
    ended_s = max(
        (
            *(attempt.ended_at_s or attempt.issued_at_s for attempt in evidence.attempts),
            *(commit.committed_at_s for commit in evidence.commits),
        )
    )
    for attempt in evidence.attempts:
        seconds = working_s(attempt.phases_s)
        finished = attempt.reward is not None
        if finished and not attempt.phases_s:
            continue
        if not finished and not seconds:
            if attempt.cause is Cause.CANCELLED and not attempt.offered:
                # Its driver was lost at an unknown time.
                continue
            if attempt.cause is Cause.INFRA and attempt.phases_s:
                # It failed before its agent started.
                continue
            # A lower bound of the time that its agent worked.
            seconds = (attempt.ended_at_s or ended_s) - attempt.issued_at_s - before_s
            if seconds <= 0:
                continue
        task = str(tasks[groups[attempt.rollout_id]])
        solved = attempt.solved if finished else None
        yield AttemptDuration(task=task, seconds=seconds, finished=finished, solved=solved)
