"""The checks of `verify` about groups: baselines, scales, advantages and the history of tasks.

Invariants:
- Times, rewards and causes of attempts are the evidence; the records of rollouts, groups and tasks must follow from
  them.
- A group is checked by the formula that it was sealed with (`groups.advantage`), computed again without the buffer's
  own code (`expected_advantages`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from headrace.buffer.audit.expected_advantages import (
    KINDS,
    CompleteGroups,
    ExpectedAdvantages,
    Result,
    expected_baseline,
    expected_reward,
    expected_turns,
    expected_values,
)
from headrace.buffer.audit.joined_rows import GroupHistory
from headrace.buffer.core.acceptance import AcceptanceRule, GroupView, effective_since, parse_rule
from headrace.buffer.core.classification import FAILED
from headrace.buffer.core.records import GroupRecord, GroupState, RolloutRecord, RolloutState, TaskRecord
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.step_scores import StepScores
from headrace.buffer.trajectories.types import Cause, GroupId, RolloutId

_WITH_ADVANTAGE = frozenset({RolloutState.SEALED, RolloutState.LEASED, RolloutState.TRAINED})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sealed:
    """A sealed group with its evidence. `finishes` holds, by member, the first result that had arrived when the group
    was sealed, and `first_values` the values of its turns; `scores` are those of each member's current attempt."""

    group: GroupRecord
    members: Sequence[RolloutRecord]
    rule: AcceptanceRule
    min_members: int
    finishes: Mapping[RolloutId, Result]
    scores: Mapping[RolloutId, StepScores | None]
    first_values: Sequence[Mapping[int, float]]
    own: CompleteGroups
    pooled: CompleteGroups

    @property
    def fixed(self) -> list[RolloutRecord]:
        """Members that were given a baseline."""
        return [member for member in self.members if member.late or member.rollout_id in self.finishes]


class GroupAudit:
    """Finds contradictions in groups and describes them in plain sentences. Call `check` once for each group, in the
    order of sealing, then `finish`."""

    def __init__(
        self,
        retried: Collection[tuple[str, int | None]],
        *,
        has_history: bool = True,
        source_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        """`retried` are the attempts (rollout, number) that an operator issued again because their results were lost.
        If the groups sealed earlier are not available (`has_history` is false), scales are not checked. `source_of`
        returns the name of a task's source: the groups of one source have the same size, and share their spread."""
        self._retried, self._has_history, self._source_of = retried, has_history, source_of
        self._sizes: dict[str, dict[int, list[GroupId]]] = defaultdict(lambda: defaultdict(list))
        self._by_task: dict[TaskId, CompleteGroups] = defaultdict(CompleteGroups)
        self._by_source: dict[str, CompleteGroups] = defaultdict(CompleteGroups)
        # Complete groups that no group sealed so far could know of.
        self._coming: list[tuple[int, int, GroupRecord, list[float]]] = []
        self._counts: dict[TaskId, Counter[str]] = defaultdict(Counter)

    def check(self, history: GroupHistory) -> Iterator[str]:
        """Yield the contradictions in one group."""
        group, members = history.group, history.members
        numbers = [member.member for member in members]
        whole = numbers == list(range(len(numbers)))
        self._sizes[self._source_of(group.task_id)][len(numbers) if whole else -1].append(group.group_id)
        for rollout in members:
            tries, first = history.attempts.get(rollout.rollout_id, ()), history.first_result(rollout)
            if rollout.first_reward != (first.reward if first else None):
                yield f"{rollout.rollout_id} counts {rollout.first_reward} in its group, which is not its first result"
            if (rollout.first_values or {}) != expected_values(first.scores if first else None):
                yield f"{rollout.rollout_id} counts {rollout.first_values} for its turns, not its first result's scores"
            for attempt in tries:
                scores = attempt.scores
                if scores is not None and not _close(attempt.reward or 0.0, expected_reward(scores)):
                    yield (
                        f"{rollout.rollout_id} attempt {attempt.attempt} has reward {attempt.reward}, but its outcome "
                        f"and the scores of its steps give {expected_reward(scores)}"
                    )
            if rollout.evictions > group.max_evictions:
                yield f"{rollout.rollout_id} was issued again {rollout.evictions} times, more than its group allows"
            # Each eviction is of an attempt that ended.
            ends = sum(one.reward is not None or (one.cause is Cause.CANCELLED and one.offered) for one in tries)
            if rollout.evictions + (rollout.state is RolloutState.EVICTED) > ends:
                yield f"{rollout.rollout_id} counts more evictions than it has ended attempts"
        complete = group.state is GroupState.SEALED and all(
            member.finished or member.state is RolloutState.POISON for member in members
        )
        if complete != (group.complete_before is not None):
            marked = "incomplete" if complete else "complete"
            yield f"{group.group_id} is marked as {marked}, but its members contradict this"
        if group.state is GroupState.SEALED and self._has_history:
            yield from self._sealed(history)
        counts = self._counts[group.task_id]
        counts["groups"] += 1
        if group.complete_before is not None:
            counts["complete_members"] += sum(member.finished for member in members)
        for rollout in members:
            counts["poison"] += rollout.state is RolloutState.POISON
            counts["cancelled"] += rollout.state is RolloutState.CANCELLED
            counts["evicted"] += rollout.evictions + (rollout.state is RolloutState.EVICTED)
        for tries in history.attempts.values():
            for attempt in tries:
                counts["finished"] += attempt.reward is not None
                counts["solved"] += attempt.solved
                counts["infra"] += attempt.cause in FAILED

    def finish(self, tasks: Iterable[TaskRecord] | None) -> Iterator[str]:
        """Yield the contradictions across all groups: in their sizes, and in the counts of each task record. If `tasks`
        is None, task records are not checked."""
        for sizes in self._sizes.values():
            size = max(sizes)
            for found, groups in sizes.items():
                for group_id in groups if found != size else ():
                    yield f"{group_id} has fewer than {size} members: rollouts are missing"
        if tasks is None:
            return
        known = {task.task_id: task for task in tasks}
        for task_id in sorted({*known, *self._counts}):
            record, counts = known.get(task_id, TaskRecord(task_id=task_id)), self._counts[task_id]
            for name in _COUNTED:
                if getattr(record, name) != counts[name]:
                    yield f"task {task_id} counts {getattr(record, name)} {name}, but the ledger has {counts[name]}"

    def _sealed(self, history: GroupHistory) -> Iterator[str]:
        """Yield the contradictions in a sealed group, given the history at the time it was sealed."""
        group, members = history.group, history.members
        while self._coming and self._coming[0][0] <= (group.seal_order or 0):
            _, _, earlier, its_rewards = heappop(self._coming)
            for complete in (self._by_task[earlier.task_id], self._by_source[self._source_of(earlier.task_id)]):
                complete.add(its_rewards, earlier.advantage)
        rewards = [member.first_reward for member in members if member.first_reward is not None]
        if group.complete_before is not None and rewards:
            heappush(self._coming, (group.complete_before, group.ordinal, group, rewards))
        # A result that was acknowledged and never stored: its time is unknown, and baselines may depend on it. An
        # operator has retried it, and its attempt has no token.
        tries = (attempt for tries in history.attempts.values() for attempt in tries)
        if self._retried and any(attempt.key in self._retried and not attempt.trained for attempt in tries):
            return
        early = [(member.rollout_id, history.first_result(member)) for member in members if not member.late]
        current = ((member.rollout_id, history.current(member)) for member in members)
        try:
            yield from _sealed_group(
                _Sealed(
                    group=group,
                    members=members,
                    rule=_rule(group.rule or ""),
                    min_members=group.min_members or 0,
                    finishes={
                        rollout_id: Result(first.ended_at_s or 0.0, first.reward)
                        for rollout_id, first in early
                        if first is not None and first.reward is not None
                    },
                    scores={rollout_id: attempt.scores for rollout_id, attempt in current if attempt is not None},
                    first_values=[expected_values(first.scores) for _, first in early if first is not None],
                    own=self._by_task[group.task_id],
                    pooled=self._by_source[self._source_of(group.task_id)],
                )
            )
        except ValueError as error:
            yield f"{group.group_id}: {error}"


_rule = lru_cache(parse_rule)
_COUNTED = ("groups", "complete_members", "poison", "cancelled", "evicted", "finished", "solved", "infra")


def _sealed_group(sealed: _Sealed) -> Iterator[str]:
    name = sealed.group.group_id
    if len(sealed.finishes) < max(2, sealed.min_members):
        yield f"{name} was sealed with only {len(sealed.finishes)} finished members"
        return
    group = sealed.group
    view = GroupView(
        size=len(sealed.members),
        finished=len(sealed.finishes),
        running=sum(member.late for member in sealed.members),
        opened_at_s=group.opened_at_s,
        last_finished_at_s=max(finish.at_s for finish in sealed.finishes.values()),
    )
    accepts_at_s = effective_since(sealed.rule, view, sealed.min_members)
    if not sealed.rule.expires and accepts_at_s > (group.ended_at_s or 0.0):
        yield f"{name} was sealed before its rule {sealed.rule.text} accepted"
    if group.advantage not in KINDS:
        yield f"{name} was sealed with the unknown kind of advantages {group.advantage}"
        return
    ends = (member.rollout_id in sealed.finishes or member.state is RolloutState.POISON for member in sealed.members)
    complete = all(ends) and not any(member.late for member in sealed.members)
    expected = ExpectedAdvantages(
        kind=group.advantage,
        rewards=[finish.reward for finish in sealed.finishes.values()] if complete else None,
        members=len(sealed.fixed),
        own=sealed.own,
        pooled=sealed.pooled,
    )
    for member in sealed.fixed:
        baseline = expected_baseline(
            sealed.rule,
            [finish for other, finish in sealed.finishes.items() if other != member.rollout_id],
            size=len(sealed.members),
            min_members=sealed.min_members,
            opened_at_s=group.opened_at_s,
        )
        if member.baseline is None or not _close(member.baseline, baseline):
            yield f"{member.rollout_id} has baseline {member.baseline}, but its group's results give {baseline}"
        elif member.scale is None or not _close(member.scale, expected.scale):
            yield f"{member.rollout_id} has scale {member.scale}, but {group.advantage} gives {expected.scale}"
        elif member.advantage is None or member.reward is None:
            if member.state in _WITH_ADVANTAGE:
                yield f"{member.rollout_id} has advantage {member.advantage}, which does not follow from its reward"
        elif not _close(member.advantage, expected.advantage(member.reward, baseline)):
            yield f"{member.rollout_id} has advantage {member.advantage}, which does not follow from its reward"
        else:
            turns = expected_turns(expected_values(sealed.scores.get(member.rollout_id)), sealed.first_values)
            stored = member.turn_advantages or {}
            if stored.keys() != turns.keys() or not all(_close(stored[turn], turns[turn]) for turn in turns):
                yield f"{member.rollout_id} has advantages {stored} of turns, but its group's scores give {turns}"


def _close(stored: float, expected: float) -> bool:
    return math.isclose(stored, expected, rel_tol=1e-6, abs_tol=1e-9)
