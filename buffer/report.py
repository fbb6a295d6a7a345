"""What acceptance and the staleness bound did to long rollouts, from the evidence of a run.

Invariants:
- Every finished attempt is in exactly one decile of duration and has exactly one fate.
- What was cancelled has no duration, only the time it had run: it stands in the decile of that time, or a higher one
  had it gone on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.buffer.records import GroupState, RolloutState
from headrace.buffer.types import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.buffer.evidence import Evidence
    from headrace.buffer.records import AttemptRecord, RolloutRecord
    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import GroupId, RolloutId

DECILES = 10
_FATES = {
    RolloutState.TRAINED: "trained",
    RolloutState.EVICTED: "evicted",
    RolloutState.FILTERED: "filtered",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecileReport:
    """A tenth of the finished attempts, by duration from issue to offer. `finished` is the sum of `trained`,
    `evicted` (over the bound, issued again or not), `filtered` and `held` (may still be trained). `cancelled` ones did
    not finish. `mean_reward` is over the finished ones, None without any."""

    decile: int
    shortest_s: float
    longest_s: float
    finished: int
    trained: int
    evicted: int
    filtered: int
    held: int
    cancelled: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One group that was sealed with members unfinished. Means are over first results; None without any. Durations
    are from issue to offer."""

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


def acceptance_by_decile(evidence: Evidence) -> tuple[DecileReport, ...]:
    """Shortest first; empty before anything finished."""
    rollouts = {rollout.rollout_id: rollout for rollout in evidence.rollouts}
    finished = sorted((attempt for attempt in evidence.attempts if attempt.reward is not None), key=_duration_s)
    tenths = [
        finished[len(finished) * number // DECILES : len(finished) * (number + 1) // DECILES]
        for number in range(DECILES)
    ]
    tenths = [tenth for tenth in tenths if tenth]
    longest_s = [_duration_s(tenth[-1]) for tenth in tenths]
    cancelled = Counter(
        min(bisect_left(longest_s, _duration_s(attempt)), len(tenths) - 1)
        for attempt in evidence.attempts
        if _cancelled_by_policy(attempt, rollouts)
    )
    return tuple(_decile(place, tenth, cancelled[place], rollouts) for place, tenth in enumerate(tenths))


def evictions(evidence: Evidence) -> int:
    """How often a rollout went over the bound, whether it was issued again or ended by it."""
    return sum(rollout.evictions + (rollout.state is RolloutState.EVICTED) for rollout in evidence.rollouts)


def left_out(evidence: Evidence) -> tuple[LeftOut, ...]:
    """What the rule left out of each group that it sealed early, in the order of opening."""
    firsts: dict[RolloutId, AttemptRecord] = {}
    for attempt in evidence.attempts:
        if attempt.reward is not None:
            firsts.setdefault(attempt.rollout_id, attempt)
    members: dict[GroupId, list[RolloutRecord]] = defaultdict(list)
    for rollout in evidence.rollouts:
        members[rollout.group_id].append(rollout)
    return tuple(
        _left_out(group.group_id, group.task_id, group.rule or "", members[group.group_id], firsts)
        for group in evidence.groups
        if group.state is GroupState.SEALED and any(member.late for member in members[group.group_id])
    )


def _decile(
    place: int, tenth: Sequence[AttemptRecord], cancelled: int, rollouts: Mapping[RolloutId, RolloutRecord]
) -> DecileReport:
    fates = Counter(_fate(attempt, rollouts[attempt.rollout_id]) for attempt in tenth)
    return DecileReport(
        decile=place + 1,
        shortest_s=_duration_s(tenth[0]),
        longest_s=_duration_s(tenth[-1]),
        finished=len(tenth),
        trained=fates["trained"],
        evicted=fates["evicted"],
        filtered=fates["filtered"],
        held=fates["held"],
        cancelled=cancelled,
        mean_reward=_mean([attempt.reward or 0.0 for attempt in tenth]),
    )


def _left_out(
    group_id: GroupId,
    task_id: TaskId,
    rule: str,
    members: Sequence[RolloutRecord],
    firsts: Mapping[RolloutId, AttemptRecord],
) -> LeftOut:
    late = [member.rollout_id for member in members if member.late]
    early_firsts = [firsts[member.rollout_id] for member in members if not member.late and member.rollout_id in firsts]
    late_firsts = [firsts[rollout_id] for rollout_id in late if rollout_id in firsts]
    return LeftOut(
        group_id=group_id,
        task_id=task_id,
        rule=rule,
        early=len(early_firsts),
        late=len(late),
        late_finished=len(late_firsts),
        early_mean_s=_mean([_duration_s(attempt) for attempt in early_firsts]),
        late_mean_s=_mean([_duration_s(attempt) for attempt in late_firsts]),
        early_mean_reward=_mean([attempt.reward or 0.0 for attempt in early_firsts]),
        late_mean_reward=_mean([attempt.reward or 0.0 for attempt in late_firsts]),
    )


def _fate(attempt: AttemptRecord, rollout: RolloutRecord) -> str:
    if attempt.attempt != rollout.attempt or rollout.state is RolloutState.PENDING:
        return "evicted"
    return _FATES.get(rollout.state, "held")


def _cancelled_by_policy(attempt: AttemptRecord, rollouts: Mapping[RolloutId, RolloutRecord]) -> bool:
    """Told to end, or left out; not those whose driver or order was lost."""
    if attempt.cause is not Cause.CANCELLED:
        return False
    rollout = rollouts[attempt.rollout_id]
    return attempt.offered or (rollout.state is RolloutState.CANCELLED and rollout.attempt == attempt.attempt)


def _duration_s(attempt: AttemptRecord) -> float:
    """The clock may have jumped back."""
    return max(0.0, (attempt.ended_at_s or attempt.issued_at_s) - attempt.issued_at_s)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
