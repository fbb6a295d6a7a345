"""The part of `verify` about groups: baselines, scales, advantages and the history of tasks, from attempts alone.

Invariant: times, rewards and causes of attempts are the evidence; what rollouts, groups and tasks say must follow.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.buffer.acceptance import GroupView, effective_since, parse_rule
from headrace.buffer.advantages import Finish, advantage, baseline, deviation_square_sum, full_scale, history_scale
from headrace.buffer.classification import FAILED
from headrace.buffer.records import GroupState, RolloutState, TaskRecord
from headrace.buffer.types import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace.buffer.acceptance import AcceptanceRule
    from headrace.buffer.evidence import Evidence
    from headrace.buffer.records import AttemptRecord, GroupRecord, RolloutRecord
    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import GroupId, RolloutId

Sums = tuple[float, int]
"""Sum of squares within complete groups, and their members."""

_WITH_ADVANTAGE = frozenset({RolloutState.SEALED, RolloutState.LEASED, RolloutState.TRAINED})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sealed:
    """A sealed group with its evidence. `finishes` are the first results that were in when it was sealed."""

    group: GroupRecord
    members: Sequence[RolloutRecord]
    rule: AcceptanceRule
    min_members: int
    finishes: Mapping[RolloutId, Finish]
    own: Sums
    pooled: Sums

    @property
    def fixed(self) -> list[RolloutRecord]:
        """Members that got a baseline."""
        return [member for member in self.members if member.late or member.rollout_id in self.finishes]


def group_problems(evidence: Evidence) -> list[str]:
    """What contradicts, as plain sentences."""
    attempts: dict[RolloutId, list[AttemptRecord]] = defaultdict(list)
    for attempt in evidence.attempts:
        attempts[attempt.rollout_id].append(attempt)
    firsts = {
        rollout_id: next((attempt for attempt in tries if attempt.reward is not None), None)
        for rollout_id, tries in attempts.items()
    }
    members: dict[str, list[RolloutRecord]] = defaultdict(list)
    for rollout in sorted(evidence.rollouts, key=lambda rollout: rollout.member):
        members[rollout.group_id].append(rollout)
    return [
        *_first_rewards(evidence, firsts),
        *_evictions(evidence, attempts),
        *_completeness(evidence.groups, members),
        *_sealed_groups(evidence, members, firsts, _unwitnessed(evidence)),
        *_tasks(evidence, members),
    ]


def _first_rewards(evidence: Evidence, firsts: Mapping[RolloutId, AttemptRecord | None]) -> Iterator[str]:
    for rollout in evidence.rollouts:
        first = firsts.get(rollout.rollout_id)
        if rollout.first_reward != (first.reward if first else None):
            yield f"{rollout.rollout_id} counts {rollout.first_reward} in its group, not its first result"


def _evictions(evidence: Evidence, attempts: Mapping[RolloutId, Sequence[AttemptRecord]]) -> Iterator[str]:
    """No more than the cap, and each of an attempt that ended."""
    caps = {group.group_id: group.max_evictions for group in evidence.groups}
    for rollout in evidence.rollouts:
        if rollout.evictions > caps.get(rollout.group_id, 0):
            yield f"{rollout.rollout_id} was issued again {rollout.evictions} times, over its group's cap"
        ends = sum(
            attempt.reward is not None or (attempt.cause is Cause.CANCELLED and attempt.offered)
            for attempt in attempts.get(rollout.rollout_id, ())
        )
        if rollout.evictions + (rollout.state is RolloutState.EVICTED) > ends:
            yield f"{rollout.rollout_id} counts more evictions than its attempts have ends"


def _completeness(groups: Sequence[GroupRecord], members: Mapping[str, Sequence[RolloutRecord]]) -> Iterator[str]:
    for group in groups:
        complete = group.state is GroupState.SEALED and all(
            member.finished or member.state is RolloutState.POISON for member in members[group.group_id]
        )
        if complete != (group.complete_before is not None):
            yield f"{group.group_id} says it is {'not ' if complete else ''}complete, its members say otherwise"


def _sealed_groups(
    evidence: Evidence,
    members: Mapping[str, Sequence[RolloutRecord]],
    firsts: Mapping[RolloutId, AttemptRecord | None],
    unwitnessed: set[GroupId],
) -> Iterator[str]:
    """In the order of sealing, with the history that each had."""
    sealed = [group for group in evidence.groups if group.state is GroupState.SEALED]
    complete = sorted(
        (group for group in sealed if group.complete_before is not None),
        key=lambda group: -(group.complete_before or 0),
    )
    history: dict[TaskId | None, Sums] = defaultdict(lambda: (0.0, 0))
    for group in sorted(sealed, key=lambda group: group.seal_order or 0):
        while complete and (complete[-1].complete_before or 0) <= (group.seal_order or 0):
            _remember(history, complete[-1].task_id, members[complete.pop().group_id])
        if group.group_id in unwitnessed:
            continue
        try:
            yield from _sealed_group(
                _Sealed(
                    group=group,
                    members=members[group.group_id],
                    rule=parse_rule(group.rule or ""),
                    min_members=group.min_members or 0,
                    finishes=_finishes(members[group.group_id], firsts),
                    own=history[group.task_id],
                    pooled=history[None],
                )
            )
        except ValueError as error:
            yield f"{group.group_id}: {error}"


def _unwitnessed(evidence: Evidence) -> set[GroupId]:
    """Groups sealed with a result that was acknowledged and never stored: nobody knows when it came, on which baselines
    may depend. An operator has retried it, and its attempt has no token."""
    retried = {(entry.subject, entry.attempt) for entry in evidence.interventions}
    empty = {attempt.rollout_id for attempt in evidence.attempts if attempt.key in retried and not attempt.trained}
    return {rollout.group_id for rollout in evidence.rollouts if rollout.rollout_id in empty}


def _remember(history: dict[TaskId | None, Sums], task_id: TaskId, members: Sequence[RolloutRecord]) -> None:
    rewards = [member.first_reward for member in members if member.first_reward is not None]
    if rewards:
        for key in (task_id, None):
            squares, count = history[key]
            history[key] = (squares + deviation_square_sum(rewards), count + len(rewards))


def _finishes(
    members: Sequence[RolloutRecord], firsts: Mapping[RolloutId, AttemptRecord | None]
) -> dict[RolloutId, Finish]:
    early = ((member.rollout_id, firsts.get(member.rollout_id)) for member in members if not member.late)
    return {
        rollout_id: Finish(at_s=first.ended_at_s or 0.0, reward=first.reward)
        for rollout_id, first in early
        if first is not None and first.reward is not None
    }


def _sealed_group(sealed: _Sealed) -> Iterator[str]:
    name = sealed.group.group_id
    if len(sealed.finishes) < max(2, sealed.min_members):
        yield f"{name} was sealed with {len(sealed.finishes)} finished members"
        return
    if not sealed.rule.expires and not _accepted(sealed):
        yield f"{name} was sealed before its rule {sealed.rule.text} accepted"
    scale = _scale(sealed)
    for member in sealed.fixed:
        expected = _baseline(sealed, member.rollout_id)
        if member.baseline is None or not _close(member.baseline, expected):
            yield f"{member.rollout_id} has baseline {member.baseline}, its group's results say {expected}"
        elif member.scale is None or not _close(member.scale, scale):
            yield f"{member.rollout_id} has scale {member.scale}, the history says {scale}"
        elif not _consistent(member):
            yield f"{member.rollout_id} has advantage {member.advantage}, which does not follow from its reward"


def _baseline(sealed: _Sealed, rollout_id: RolloutId) -> float:
    return baseline(
        sealed.rule,
        [finish for other, finish in sealed.finishes.items() if other != rollout_id],
        size=len(sealed.members),
        min_members=sealed.min_members,
        opened_at_s=sealed.group.opened_at_s,
    )


def _accepted(sealed: _Sealed) -> bool:
    view = GroupView(
        size=len(sealed.members),
        finished=len(sealed.finishes),
        running=sum(member.late for member in sealed.members),
        opened_at_s=sealed.group.opened_at_s,
        last_finished_at_s=max(finish.at_s for finish in sealed.finishes.values()),
    )
    return effective_since(sealed.rule, view, sealed.min_members) <= (sealed.group.ended_at_s or 0.0)


def _scale(sealed: _Sealed) -> float:
    if sealed.group.advantage == "centered":
        return 1.0
    ends = (member.rollout_id in sealed.finishes or member.state is RolloutState.POISON for member in sealed.members)
    if all(ends) and not any(member.late for member in sealed.members):
        return full_scale([finish.reward for finish in sealed.finishes.values()])
    return history_scale(sealed.own, sealed.pooled)


def _consistent(member: RolloutRecord) -> bool:
    if member.advantage is None or member.reward is None:
        return member.state not in _WITH_ADVANTAGE
    return _close(member.advantage, advantage(member.reward, member.baseline or 0.0, member.scale or 1.0))


def _close(stored: float, expected: float) -> bool:
    return math.isclose(stored, expected, rel_tol=1e-6, abs_tol=1e-9)


def _tasks(evidence: Evidence, members: Mapping[str, Sequence[RolloutRecord]]) -> Iterator[str]:
    """The counts and sums of each task record."""
    task_of = {group.group_id: group.task_id for group in evidence.groups}
    counts: dict[str, Counter[TaskId]] = defaultdict(Counter)
    for group in evidence.groups:
        counts["groups"][group.task_id] += 1
        if group.complete_before is not None:
            counts["complete_members"][group.task_id] += sum(member.finished for member in members[group.group_id])
    task_of_rollout = {}
    for rollout in evidence.rollouts:
        task = task_of_rollout[rollout.rollout_id] = task_of[rollout.group_id]
        counts["poison"][task] += rollout.state is RolloutState.POISON
        counts["cancelled"][task] += rollout.state is RolloutState.CANCELLED
        counts["evicted"][task] += rollout.evictions + (rollout.state is RolloutState.EVICTED)
    for attempt in evidence.attempts:
        if (of := task_of_rollout.get(attempt.rollout_id)) is not None:
            counts["finished"][of] += attempt.reward is not None
            counts["solved"][of] += attempt.solved
            counts["infra"][of] += attempt.cause in FAILED
    known = {task.task_id: task for task in evidence.tasks}
    for task_id in sorted({*known, *counts["groups"]}):
        task_record = known.get(task_id, TaskRecord(task_id=task_id))
        for name, by_task in counts.items():
            if getattr(task_record, name) != by_task[task_id]:
                yield f"task {task_id} counts {getattr(task_record, name)} {name}, the ledger has {by_task[task_id]}"
