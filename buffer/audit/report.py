"""The effect of acceptance and the staleness bound on long rollouts, from the evidence of a run.

Invariants:
- Every finished attempt is in exactly one decile of duration and has exactly one fate.
- A cancelled attempt has no duration, only the time it had been running. It counts in the decile of that time, which is
  a lower bound on the duration.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from headrace.buffer.audit.evidence import Evidence, StreamedEvidence
from headrace.buffer.audit.joined_rows import GroupHistory
from headrace.buffer.core.records import AttemptRecord, GroupState, OperatorAction, RolloutState
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import Cause, GroupId

DECILES = 10
_FATES = {RolloutState.TRAINED: "trained", RolloutState.EVICTED: "evicted", RolloutState.FILTERED: "filtered"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecileReport:
    """A tenth of the finished attempts, by duration from issue to offer. `finished` is the sum of `trained`, `evicted`
    (over the bound, whether or not issued again), `undone` (issued again because the result was lost, or because a
    resume undid the steps that its policy came from), `filtered` and `held` (may still be trained). `cancelled`
    attempts did not finish. `mean_reward` is over the finished attempts, None if there are none."""

    decile: int
    shortest_s: float
    longest_s: float
    finished: int
    trained: int
    evicted: int
    undone: int
    filtered: int
    held: int
    cancelled: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A group that was sealed with unfinished members. Means are over first results, or None if there are none.
    Durations are from issue to offer."""

    group_id: GroupId
    task_id: TaskId
    rule: str
    early: int
    late: int
    late_finished: int
    early_mean_s: float | None
    late_mean_s: float | None
    early_mean_reward: float | None
    late_mean_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How all attempts ended. `causes` counts the ended attempts by cause; `evicted` counts how often a rollout
    exceeded the bound, whether or not it was issued again. `deciles` start with the shortest attempts, and are empty
    before any attempt has finished. `left_out` is in the order in which the groups were opened."""

    deciles: tuple[DecileReport, ...]
    left_out: tuple[LeftOut, ...]
    causes: dict[str, int]
    evicted: int


def acceptance(evidence: Evidence | StreamedEvidence) -> Acceptance:
    """Compute the report in one pass over all groups."""
    finished: list[_Finished] = []
    cancelled_s: list[float] = []
    causes: Counter[str] = Counter()
    groups: list[tuple[int, LeftOut]] = []
    evicted = 0
    lost = {
        (entry.subject, entry.attempt) for entry in evidence.interventions if entry.action is OperatorAction.RETRY_LOST
    }
    for history in evidence.histories():
        for rollout in history.members:
            evicted += rollout.evictions + (rollout.state is RolloutState.EVICTED)
            for attempt in history.attempts.get(rollout.rollout_id, ()):
                if attempt.cause is not None:
                    causes[attempt.cause.value] += 1
                if attempt.reward is not None:
                    fate = _FATES.get(rollout.state, "held")
                    if attempt.attempt != rollout.attempt or rollout.state is RolloutState.PENDING:
                        fate = "evicted" if rollout.evictions and attempt.key not in lost else "undone"
                    finished.append((_duration_s(attempt), fate, attempt.reward))
                # Cancelled by policy, or left out; not those whose driver or order was lost.
                left_out = rollout.state is RolloutState.CANCELLED and rollout.attempt == attempt.attempt
                if attempt.cause is Cause.CANCELLED and (attempt.offered or left_out):
                    cancelled_s.append(_duration_s(attempt))
        if history.group.state is GroupState.SEALED and any(member.late for member in history.members):
            groups.append((history.group.ordinal, _left_out(history)))
    return Acceptance(
        deciles=_deciles(finished, cancelled_s),
        left_out=tuple(group for _, group in sorted(groups, key=itemgetter(0))),
        causes=dict(causes),
        evicted=evicted,
    )


_Finished = tuple[float, str, float]
"""Duration, fate and reward of an attempt."""


def _deciles(finished: list[_Finished], cancelled_s: Sequence[float]) -> tuple[DecileReport, ...]:
    finished.sort(key=itemgetter(0))
    tenths = [
        finished[len(finished) * number // DECILES : len(finished) * (number + 1) // DECILES]
        for number in range(DECILES)
    ]
    tenths = [tenth for tenth in tenths if tenth]
    longest_s = [tenth[-1][0] for tenth in tenths]
    cancelled = Counter(min(bisect_left(longest_s, seconds), len(tenths) - 1) for seconds in cancelled_s)
    reports = []
    for place, tenth in enumerate(tenths):
        fates = Counter(fate for _, fate, _ in tenth)
        report = DecileReport(
            decile=place + 1,
            shortest_s=tenth[0][0],
            longest_s=tenth[-1][0],
            finished=len(tenth),
            trained=fates["trained"],
            evicted=fates["evicted"],
            undone=fates["undone"],
            filtered=fates["filtered"],
            held=fates["held"],
            cancelled=cancelled[place],
            mean_reward=_mean([reward for _, _, reward in tenth]),
        )
        reports.append(report)
    return tuple(reports)


def _left_out(history: GroupHistory) -> LeftOut:
    group, members = history.group, history.members
    firsts = {member.rollout_id: history.first_result(member) for member in members}
    late = [member for member in members if member.late]
    early_firsts = [first for member in members if not member.late and (first := firsts[member.rollout_id])]
    late_firsts = [first for member in late if (first := firsts[member.rollout_id])]
    return LeftOut(
        group_id=group.group_id,
        task_id=group.task_id,
        rule=group.rule or "",
        early=len(early_firsts),
        late=len(late),
        late_finished=len(late_firsts),
        early_mean_s=_mean([_duration_s(attempt) for attempt in early_firsts]),
        late_mean_s=_mean([_duration_s(attempt) for attempt in late_firsts]),
        early_mean_reward=_mean([attempt.reward or 0.0 for attempt in early_firsts]),
        late_mean_reward=_mean([attempt.reward or 0.0 for attempt in late_firsts]),
    )


def _duration_s(attempt: AttemptRecord) -> float:
    # The clock may have been set back.
    return max(0.0, (attempt.ended_at_s or attempt.issued_at_s) - attempt.issued_at_s)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
