"""What became of the rollouts of each source of tasks, from the evidence of a run.

Invariants:
- Every rollout of the ledger counts for exactly one source, in its current state; undone steps do not count.
- A run without sources has no such report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from headrace.buffer.audit.evidence import Evidence, StreamedEvidence
from headrace.buffer.core.classification import FAILED
from headrace.buffer.core.records import RolloutState
from headrace.buffer.trajectories.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One source of tasks. `share` is the wanted share of the `trained` rollouts, `realised` the actual one (None
    before the first). Means are over trained rollouts, `mean_s` over finished attempts from issue to offer; they are
    None if there are none. Staleness is in optimizer updates. `evictions` counts how often a rollout exceeded its
    bound, `filtered` and `poison` count rollouts, `infra` failed attempts, `parked` tasks that are no longer issued;
    `last_failure` is why the last failed attempt in the order of sealing failed."""

    share: float
    realised: float | None
    trained: int
    mean_reward: float | None
    mean_staleness: float | None
    mean_s: float | None
    evictions: int
    filtered: int
    poison: int
    infra: int
    parked: int
    last_failure: str


def source_reports(evidence: Evidence | StreamedEvidence) -> dict[str, SourceReport]:
    """Compute the report of each source in one pass over all groups."""
    if not evidence.sources:
        return {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    groups: dict[GroupId, str] = {}
    failures: dict[str, str] = {}
    for history in evidence.histories():
        name = groups[history.group.group_id] = evidence.source_of(history.group.task_id)
        for rollout in history.members:
            counts[name][rollout.state] += 1
            counts[name]["evictions"] += rollout.evictions + (rollout.state is RolloutState.EVICTED)
            if rollout.state is RolloutState.TRAINED:
                sums[name]["reward"] += rollout.reward or 0.0
            for attempt in history.attempts.get(rollout.rollout_id, ()):
                if attempt.cause in FAILED:
                    counts[name]["infra"] += 1
                    failures[name] = attempt.detail
                elif attempt.reward is not None:
                    counts[name]["finished"] += 1
                    sums[name]["seconds"] += max(0.0, (attempt.ended_at_s or 0.0) - attempt.issued_at_s)
    steps = {step.batch_id for step in evidence.surviving}
    for batch in evidence.batches:
        for member in batch.members if batch.batch_id in steps else ():
            name = groups[GroupId(member.rollout_id.rpartition("-")[0])]
            counts[name]["in_steps"] += 1
            sums[name]["staleness"] += member.staleness
    parked = Counter(evidence.source_of(task.task_id) for task in evidence.tasks if task.parked)
    whole = sum(count[RolloutState.TRAINED] for count in counts.values())
    return {
        name: SourceReport(
            share=share,
            realised=counts[name][RolloutState.TRAINED] / whole if whole else None,
            trained=counts[name][RolloutState.TRAINED],
            mean_reward=_mean(sums[name]["reward"], counts[name][RolloutState.TRAINED]),
            mean_staleness=_mean(sums[name]["staleness"], counts[name]["in_steps"]),
            mean_s=_mean(sums[name]["seconds"], counts[name]["finished"]),
            evictions=counts[name]["evictions"],
            filtered=counts[name][RolloutState.FILTERED],
            poison=counts[name][RolloutState.POISON],
            infra=counts[name]["infra"],
            parked=parked[name],
            last_failure=failures.get(name, ""),
        )
        for name, share in evidence.sources.items()
    }


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None
