"""Groups and attempts: what is issued, what comes back, when a group is sealed.

Invariants:
- Results count once: by (rollout, attempt), and only while that attempt is in flight. Everything else is refused and
  counted.
- A failure of the infrastructure is never a reward: it leads to a new attempt, and after `max_attempts` to poison.
- A sealed member's advantage never changes; members of a group are sealed together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.buffer.acceptance import GroupView
from headrace.buffer.advantages import advantages, zero_variance
from headrace.buffer.records import (
    FINISHED,
    AttemptRecord,
    FilterReason,
    GroupRecord,
    GroupState,
    RolloutRecord,
    RolloutState,
    TrainedTokens,
)
from headrace.buffer.types import Cause, GroupId, Outcome, Receipt, ReceiptStatus, RolloutId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.acceptance import AcceptanceRule
    from headrace.buffer.replay import BufferConfig
    from headrace.buffer.state import ReplayState
    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import RolloutResult, Row, Trajectory
    from headrace.buffer.versions import PolicyVersion, VersionTree

_FAILED = frozenset({Cause.INFRA, Cause.EVALUATOR, Cause.POISON})


class GroupBook:
    """The side of the buffer that faces the dispatcher."""

    def __init__(self, state: ReplayState, config: BufferConfig, rule: AcceptanceRule) -> None:
        self._state, self._config, self._rule = state, config, rule

    def open_group(self, task_id: TaskId, now: float) -> None:
        """A new group of `group_size` pending rollouts at the end of the task stream read so far."""
        ordinal = self._state.next_ordinal
        group_id = GroupId(f"g{ordinal:06d}")
        self._state.put(
            GroupRecord(group_id=group_id, ordinal=ordinal, task_id=task_id, state=GroupState.OPEN, opened_at_s=now)
        )
        for member in range(self._config.group_size):
            rollout_id = RolloutId(f"{group_id}-{member}")
            self._state.put(
                RolloutRecord(rollout_id=rollout_id, group_id=group_id, member=member, state=RolloutState.PENDING)
            )

    def pending(self) -> list[RolloutRecord]:
        """Rollouts that wait for an attempt, those of the oldest groups first."""
        pending = (self._state.rollouts[rollout_id] for rollout_id in self._state.by_state[RolloutState.PENDING])
        return sorted(pending, key=lambda rollout: (self._state.groups[rollout.group_id].ordinal, rollout.member))

    def start(self, rollout: RolloutRecord, version: PolicyVersion, now: float) -> RolloutRecord:
        """The next attempt of a pending rollout, in flight from now on."""
        started = self._state.move(rollout.rollout_id, RolloutState.IN_FLIGHT, attempt=rollout.attempt + 1)
        self._state.put(
            AttemptRecord(rollout_id=started.rollout_id, attempt=started.attempt, version=version, issued_at_s=now)
        )
        return started

    def offer(self, result: RolloutResult, now: float) -> Receipt:
        """Take a result in, or refuse and count it."""
        status = self._judge(result.rollout_id, result.attempt)
        if status is not ReceiptStatus.ACCEPTED:
            self._state.count(f"offers_{status}")
            return Receipt(rollout_id=result.rollout_id, attempt=result.attempt, status=status)
        outcome, trained = classify(result, self._state.tree)
        attempt = replace(
            self._state.attempts[result.rollout_id],
            ended_at_s=now,
            offered=True,
            cause=outcome.cause,
            reward=outcome.reward,
            trainable=outcome.trainable,
            detail=outcome.detail,
            trained=trained,
            turns=result.turns,
            phases_s=result.phases_s,
            trace_id=result.trace_id,
        )
        self._end(attempt, now)
        return Receipt(rollout_id=result.rollout_id, attempt=result.attempt, status=status)

    def abandon(self, rollout_id: RolloutId, attempt: int, cause: Cause, detail: str, now: float) -> bool:
        """End an attempt that nobody runs any more. False when it is not in flight."""
        if self._judge(rollout_id, attempt) is not ReceiptStatus.ACCEPTED:
            return False
        self._state.count("attempts_abandoned")
        self._end(replace(self._state.attempts[rollout_id], ended_at_s=now, cause=cause, detail=detail), now)
        return True

    def over_bound(self, version: PolicyVersion) -> tuple[tuple[RolloutId, int], ...]:
        """Attempts in flight whose first version is over the bound already."""
        running = (self._state.attempts[rollout_id] for rollout_id in self._state.by_state[RolloutState.IN_FLIGHT])
        return tuple(
            attempt.key
            for attempt in running
            if self._state.tree.staleness(version, attempt.version) > self._config.max_staleness
        )

    def _judge(self, rollout_id: RolloutId, attempt: int) -> ReceiptStatus:
        rollout = self._state.rollouts.get(rollout_id)
        if rollout is None:
            return ReceiptStatus.LATE if self._was_issued(rollout_id) else ReceiptStatus.UNKNOWN
        if attempt > rollout.attempt or attempt < 1:
            return ReceiptStatus.UNKNOWN
        if attempt < rollout.attempt:
            return ReceiptStatus.LATE
        if rollout.state is RolloutState.IN_FLIGHT:
            return ReceiptStatus.ACCEPTED
        return ReceiptStatus.DUPLICATE if self._state.attempts[rollout_id].offered else ReceiptStatus.LATE

    def _was_issued(self, rollout_id: RolloutId) -> bool:
        """Closed groups are forgotten, but ids tell their ordinal."""
        group, _, member = rollout_id.partition("-")
        known_shape = group.startswith("g") and group[1:].isdecimal() and member.isdecimal()
        return known_shape and int(group[1:]) < self._state.next_ordinal

    def _end(self, attempt: AttemptRecord, now: float) -> None:
        self._state.put(attempt)
        if attempt.cause is Cause.CANCELLED:
            self._state.count("attempts_cancelled")
            self._state.move(attempt.rollout_id, RolloutState.PENDING)
            return
        if attempt.cause in _FAILED:
            self._fail(attempt)
        else:
            self._state.move(attempt.rollout_id, RolloutState.WAITING, reward=attempt.reward)
        self._seal_if_accepted(self._state.rollouts[attempt.rollout_id].group_id, now)

    def _fail(self, attempt: AttemptRecord) -> None:
        self._state.count(f"attempts_{attempt.cause}")
        failures = self._state.rollouts[attempt.rollout_id].failures + 1
        poison = failures >= self._config.max_attempts
        state = RolloutState.POISON if poison else RolloutState.PENDING
        self._state.move(attempt.rollout_id, state, failures=failures)

    def _seal_if_accepted(self, group_id: GroupId, now: float) -> None:
        members = self._state.rollouts_of(group_id)
        finished = [rollout for rollout in members if rollout.state in FINISHED]
        poison = sum(rollout.state is RolloutState.POISON for rollout in members)
        running = len(members) - len(finished) - poison
        if running or not self._rule(GroupView(finished=len(finished), running=running, poison=poison)):
            return
        if len(finished) < self._config.min_members:
            self._drop(group_id, finished, now)
        else:
            self._seal(group_id, finished, now)

    def _drop(self, group_id: GroupId, finished: Sequence[RolloutRecord], now: float) -> None:
        self._state.put(replace(self._state.groups[group_id], state=GroupState.DROPPED, ended_at_s=now))
        self._state.count("groups_dropped")
        for rollout in finished:
            self._filter(rollout, FilterReason.GROUP_DROPPED)

    def _seal(self, group_id: GroupId, finished: Sequence[RolloutRecord], now: float) -> None:
        group = self._state.groups[group_id]
        self._state.put(replace(group, state=GroupState.SEALED, seal_order=self._state.next_seal, ended_at_s=now))
        rewards = [rollout.reward or 0.0 for rollout in finished]
        flat = zero_variance(rewards)
        self._state.count("groups_sealed")
        if flat:
            self._state.count("groups_zero_variance")
        for rollout, advantage in zip(finished, advantages(rewards, self._config.advantage), strict=True):
            reason = self._reason_to_filter(rollout.rollout_id, flat=flat)
            if reason is None:
                self._state.move(rollout.rollout_id, RolloutState.SEALED, advantage=advantage)
            else:
                self._filter(rollout, reason)

    def _reason_to_filter(self, rollout_id: RolloutId, *, flat: bool) -> FilterReason | None:
        attempt = self._state.attempts[rollout_id]
        if not attempt.trainable:
            return FilterReason.NOT_TRAINABLE
        if not attempt.trained:
            return FilterReason.NO_TOKENS
        return FilterReason.ZERO_VARIANCE if flat and self._config.zero_variance == "filter" else None

    def _filter(self, rollout: RolloutRecord, reason: FilterReason) -> None:
        self._state.move(rollout.rollout_id, RolloutState.FILTERED, reason=reason)
        self._state.count(f"filtered_{reason}")


def classify(result: RolloutResult, tree: VersionTree) -> tuple[Outcome, tuple[TrainedTokens, ...]]:
    """The outcome as the ledger counts it, and what was sampled by whom.

    A failure has no reward, whatever the worker says, and a result that contradicts itself is a failure of ours.
    """
    outcome = result.outcome
    if outcome.cause in _FAILED or outcome.cause is Cause.CANCELLED:
        return replace(outcome, reward=None, trainable=False), ()
    if outcome.reward is None or not math.isfinite(outcome.reward):
        return Outcome.infra(f"malformed result: cause {outcome.cause} with reward {outcome.reward}"), ()
    try:
        return outcome, trained_tokens(result.trajectory, tree)
    except ValueError as error:
        return Outcome.infra(f"malformed result: {error}"), ()


def trained_tokens(trajectory: Trajectory | None, tree: VersionTree) -> tuple[TrainedTokens, ...]:
    """How many trained tokens each version sampled. ValueError when arrays or spans do not fit, or a version is
    unknown."""
    counts: dict[PolicyVersion, int] = {}
    for row in trajectory.rows if trajectory else ():
        for version, tokens in _row_tokens(row):
            counts[version] = counts.get(version, 0) + tokens
    for version in counts:
        if version.epoch not in tree.forks:
            raise ValueError(f"sampled by version {version}, whose epoch was never opened")
    return tuple(TrainedTokens(version=version, tokens=counts[version]) for version in sorted(counts))


def _row_tokens(row: Row) -> list[tuple[PolicyVersion, int]]:
    length = len(row.tokens_T)
    if len(row.loss_mask_T) != length or len(row.logprobs_T) != length:
        raise ValueError("the arrays of a row differ in length")
    cumulative = np.concatenate(([0], np.cumsum(row.loss_mask_T)))
    counts, end = [], 0
    for span in row.versions:
        if not end <= span.start < span.end <= length:
            raise ValueError(f"version span [{span.start}, {span.end}) does not fit")
        end = span.end
        tokens = int(cumulative[span.end] - cumulative[span.start])
        if tokens:
            counts.append((span.version, tokens))
    if sum(tokens for _, tokens in counts) != int(cumulative[-1]):
        raise ValueError("trained tokens lie outside the version spans")
    if not np.isfinite(row.logprobs_T).all():
        raise ValueError("log-probabilities are not finite")
    return counts
