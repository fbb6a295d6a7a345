"""The sealing of open groups, which fixes their baselines and scales.

Invariants:
- For every open group, the time from which its rule accepts if nothing else happens is kept. `tick` seals the groups
  that are due, and the shell calls it again at `due_at`, so that the core needs no clock.
- A sealed group's members, finished or not, have fixed baselines and scales; a member that finishes later is sealed at
  once.
- Members without a result when their group is sealed are flagged `late`, so that each group shows what its rule left
  out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from headrace.buffer.core.acceptance import NEVER, AcceptanceRule, GroupView, effective_since, parse_rule
from headrace.buffer.core.advantages import (
    Buckets,
    Finish,
    RewardSpread,
    advantage,
    baseline,
    buckets_of,
    group_scale,
    turn_advantages,
    zero_variance,
)
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.records import FilterReason, GroupRecord, GroupState, RolloutRecord, RolloutState
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.core.task_sources.shares import Mix
from headrace.buffer.trajectories.types import Cause, GroupId, RolloutId


class Sealing:
    """Watches open groups and seals them. `aborted` holds attempts that are still running although their rollout has
    been cancelled."""

    def __init__(self, state: ReplayState, mix: Mix, history: TaskHistory) -> None:
        self._state, self._mix, self._history = state, mix, history
        self._rules = {source.name: parse_rule(source.config.rule) for source in mix.sources}
        self._expires = any(rule.expires for rule in self._rules.values())
        # The bound is the run's, hence the same for all sources.
        self._bound = mix.sources[0].config.bound
        self._due: dict[GroupId, float] = {}
        self._queue: list[tuple[float, GroupId]] = []
        self._seen = state.path.next_version
        # Attempts of cancelled rollouts that have no result may still run. Those of closed groups are forgotten by a
        # restart; their results will be late.
        cancelled = (state.attempts.get(rollout_id) for rollout_id in state.by_state[RolloutState.CANCELLED])
        unheard = (attempt.key for attempt in cancelled if attempt is not None and not attempt.offered)
        self.aborted: dict[tuple[RolloutId, int], None] = dict.fromkeys(unheard)
        for group_id in state.open_groups():
            self.watch(group_id)

    def heard(self, attempt: tuple[RolloutId, int]) -> bool:
        """Forget an attempt that has been cancelled and runs no more. Return whether it was still running."""
        was_running = attempt in self.aborted
        self.aborted.pop(attempt, None)
        return was_running

    def watch(self, group_id: GroupId) -> None:
        """Compute when an open group is due, after it has changed."""
        members, group = self._state.rollouts_of(group_id), self._state.groups[group_id]
        config, rule = self._config_of(group), self._rule_of(group)
        finished = [self._state.attempts[member.rollout_id] for member in members if member.finished]
        opened = group.opened_at_s
        updates_left = None
        if rule.expires and finished and (version := self._state.path.next_version):
            sampled = (attempt.version for attempt in finished)
            updates_left = self._bound.updates_left(self._state.path.expected_tree, version, sampled)
        view = GroupView(
            size=len(members),
            finished=len(finished),
            running=sum(member.running for member in members),
            opened_at_s=opened,
            last_finished_at_s=max((attempt.ended_at_s or 0.0 for attempt in finished), default=opened),
            updates_left=updates_left,
        )
        since = effective_since(rule, view, config.min_members)
        if self._due.get(group_id, NEVER) == since:
            return
        self._due[group_id] = since
        if since < NEVER:
            heappush(self._queue, (since, group_id))

    def restart_clocks(self, now: float) -> None:
        """Restart the timers of the rules of all open groups."""
        for group_id in self._state.open_groups():
            self._state.put(replace(self._state.groups[group_id], opened_at_s=now))
            self.watch(group_id)

    def due_at(self) -> float | None:
        """Return when the next group is due if nothing happens first."""
        while self._queue and self._due.get(self._queue[0][1]) != self._queue[0][0]:
            heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def tick(self, now: float) -> None:
        """Seal or drop every group that is due."""
        if self._expires and self._seen != (version := self._state.path.next_version):
            self._seen = version
            for group_id in self._state.open_groups():
                self.watch(group_id)
        while (due := self.due_at()) is not None and due <= now:
            _, group_id = heappop(self._queue)
            del self._due[group_id]
            members, group = self._state.rollouts_of(group_id), self._state.groups[group_id]
            finished = [member for member in members if member.finished]
            if len(finished) >= self._config_of(group).min_members:
                self._seal(group, members, now)
                self.completed(group_id)
                continue
            self._state.put(replace(group, state=GroupState.DROPPED, ended_at_s=now))
            self._state.count("groups_dropped")
            for rollout in finished:
                self._filter(rollout, FilterReason.GROUP_DROPPED)

    def arrive(self, rollout_id: RolloutId) -> None:
        """Seal a member of a sealed group that has finished late, or has finished again."""
        rollout = self._state.rollouts[rollout_id]
        members = self._state.rollouts_of(rollout.group_id)
        counted = sum(member.scale is not None for member in members)
        self._seal_member(rollout, counted, _buckets(members), flat=False)
        self.completed(rollout.group_id)

    def completed(self, group_id: GroupId) -> None:
        """Add a sealed group to the history of its task once its last member has finished."""
        group, members = self._state.groups[group_id], self._state.rollouts_of(group_id)
        if group.state is not GroupState.SEALED or group.complete_before is not None or not _complete(members):
            return
        self._state.put(replace(group, complete_before=self._state.next_seal))
        rewards = [member.first_reward for member in members if member.first_reward is not None]
        self._history.completed(group.task_id, rewards, group.advantage)

    def _seal(self, group: GroupRecord, members: Sequence[RolloutRecord], now: float) -> None:
        config = self._config_of(group)
        sealed = replace(
            group,
            state=GroupState.SEALED,
            seal_order=self._state.next_seal,
            ended_at_s=now,
            rule=self._rule_of(group).text,
            min_members=config.min_members,
            advantage=config.advantage,
        )
        self._state.put(sealed)
        self._state.count("groups_sealed")
        fixed = self._fix(sealed, members)
        counted = sum(member.scale is not None for member in fixed)
        running = [member for member in fixed if member.running]
        rewards = [member.first_reward for member in fixed if member.first_reward is not None]
        buckets = _buckets(fixed)
        by_turn = (turn_advantages(member.first_values or {}, buckets) for member in fixed)
        flat = not running and zero_variance(rewards) and not any(any(turns.values()) for turns in by_turn)
        if running:
            self._state.count("groups_sealed_early")
        if flat:
            self._state.count("groups_zero_variance")
        for member in fixed:
            if not member.running:
                if member.finished:
                    self._seal_member(member, counted, buckets, flat=flat)
            elif config.unfinished == "carry":
                self._state.put(replace(member, late=True))
            else:
                self._history.cancelled(self._state.groups[member.group_id].task_id)
                self._state.count("rollouts_cancelled")
                if member.state is RolloutState.IN_FLIGHT:
                    attempt = self._state.attempts[member.rollout_id]
                    detail = "cancelled: its group was sealed without it"
                    self._state.put(replace(attempt, ended_at_s=now, cause=Cause.CANCELLED, detail=detail))
                    self.aborted[attempt.key] = None
                self._state.put(replace(member, late=True, state=RolloutState.CANCELLED))

    def _fix(self, group: GroupRecord, members: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Return the members with their baselines and scales."""
        attempts = self._state.attempts
        finishes = {
            member.rollout_id: Finish(
                at_s=attempts[member.rollout_id].ended_at_s or 0.0, reward=member.first_reward or 0.0
            )
            for member in members
            if member.finished
        }
        config, task = self._config_of(group), self._state.task(group.task_id)
        scale = group_scale(
            config.advantage,
            [finish.reward for finish in finishes.values()] if _complete(members) else None,
            members=sum(member.finished or member.running for member in members),
            own=RewardSpread(grpo_square_sum=task.grpo_square_sum, grpo_deviation_sum=task.grpo_deviation_sum),
            pooled=self._state.reward_spread(self._mix.source_of(group.task_id).name),
        )
        return [
            replace(
                member,
                scale=scale,
                baseline=baseline(
                    self._rule_of(group),
                    [finish for rollout_id, finish in finishes.items() if rollout_id != member.rollout_id],
                    size=len(members),
                    min_members=config.min_members,
                    opened_at_s=group.opened_at_s,
                ),
            )
            if member.finished or member.running
            else member
            for member in members
        ]

    def _seal_member(self, member: RolloutRecord, counted: int, buckets: Buckets, *, flat: bool) -> None:
        assert member.reward is not None
        assert member.baseline is not None
        assert member.scale is not None
        attempt = self._state.attempts[member.rollout_id]
        if not attempt.trainable:
            self._filter(member, FilterReason.NOT_TRAINABLE)
        elif not attempt.trained:
            self._filter(member, FilterReason.NO_TOKENS)
        elif flat and self._config_of(self._state.group_of(member.rollout_id)).zero_variance == "filter":
            self._filter(member, FilterReason.ZERO_VARIANCE)
        else:
            kind = self._state.group_of(member.rollout_id).advantage
            assert kind is not None
            value = advantage(kind, member.reward, member.baseline, member.scale, members=counted)
            turns = turn_advantages(attempt.scores.values, buckets) if attempt.scores else {}
            self._state.put(replace(member, state=RolloutState.SEALED, advantage=value, turn_advantages=turns or None))

    def _config_of(self, group: GroupRecord) -> BufferConfig:
        return self._mix.config_of(group.task_id)

    def _rule_of(self, group: GroupRecord) -> AcceptanceRule:
        return self._rules[self._mix.source_of(group.task_id).name]

    def _filter(self, rollout: RolloutRecord, reason: FilterReason) -> None:
        self._state.put(replace(rollout, state=RolloutState.FILTERED, reason=reason))
        self._state.count(f"filtered_{reason}")


def _buckets(members: Sequence[RolloutRecord]) -> Buckets:
    """Return the buckets of a group: the values of the members that had finished when it was sealed."""
    return buckets_of(member.first_values for member in members if member.first_values and not member.late)


def _complete(members: Sequence[RolloutRecord]) -> bool:
    """Return whether every member finished or is poison, so that none was left out for being slow."""
    return all(member.finished or member.state is RolloutState.POISON for member in members)
