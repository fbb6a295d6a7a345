"""Rollouts of a simulated run that its planted cause has made slow, read from the ledger.

Invariant: nothing of a verdict enters; a rollout is affected if it carries the planted label and its planted part took
at least half of the planted excess longer than the run's median of that part.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from benches.verdicts.planted import Cause, Planted
from headrace.buffer.audit.evidence import Evidence
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.types import Cause as End
from headrace.buffer.trajectories.types import RolloutId

LABELS = ("host", "image", "engines", "task")


def affected_rollouts(planted: Planted, evidence: Evidence) -> set[RolloutId]:
    """Return the rollouts that ended and that the cause has affected."""
    groups = {group.group_id: group.task_id for group in evidence.groups}
    tasks = {rollout.rollout_id: groups[rollout.group_id] for rollout in evidence.rollouts}
    failed = {attempt.rollout_id for attempt in evidence.attempts if attempt.cause is End.INFRA}
    carrying: dict[RolloutId, float] = {}
    parts_s: list[float] = []
    for attempt in evidence.attempts:
        breakdown = attempt.breakdown
        if attempt.reward is None or breakdown is None:
            continue
        seconds = sum(seconds for part, seconds in breakdown.parts_s.items() if planted.is_part(part))
        parts_s.append(seconds)
        known = _labels(breakdown, attempt.host, tasks[attempt.rollout_id])
        # Causes that are no label of a rollout, such as a push, may affect any.
        wanted = [factor for factor in planted.factors if factor[0] in LABELS]
        if not wanted or any(value in known[label] for label, value in wanted):
            carrying[attempt.rollout_id] = seconds
    if planted.cause is Cause.RETRIES:
        return carrying.keys() & failed
    typical_s = median(parts_s) if parts_s else 0.0
    return {key for key, seconds in carrying.items() if seconds - typical_s >= planted.excess_s / 2}


def _labels(breakdown: Breakdown, host: str, task: str) -> dict[str, set[str]]:
    known: defaultdict[str, set[str]] = defaultdict(set)
    for name, value in breakdown.labels.items():
        known[name] |= set(value) if isinstance(value, tuple) else {str(value)}
    known["host"], known["task"] = {host}, {task}
    return known
