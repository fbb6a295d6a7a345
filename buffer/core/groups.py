"""Groups of rollouts and the results of their attempts.

Invariants:
- A result is accepted once for each (rollout, attempt), and only while that attempt is in flight. Every other result is
  refused and counted.
- A failure of the infrastructure is never a reward: it leads to a new attempt, and after `max_attempts` to poison.
  A failure that an outage or a dead worker explains does not count against the rollout (see `outages`).
- Finished members of open groups wait until the group is sealed; those of sealed groups are sealed at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from numbers import Integral

from headrace.buffer.core.classification import classify
from headrace.buffer.core.outages import COUNTED, Outages
from headrace.buffer.core.records import AttemptRecord, GroupRecord, GroupState, RolloutRecord, RolloutState
from headrace.buffer.core.sealing import Sealing
from headrace.buffer.core.staleness import evict
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.core.task_sources.shares import Mix
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.types import Cause, GroupId, Outcome, Receipt, ReceiptStatus, RolloutId, RolloutResult
from headrace.buffer.trajectories.versions import PolicyVersion

GIVEN_UP = "cancelled before its end: the run or its node was drained"


class GroupBook:
    """The side of the buffer that faces the dispatcher."""

    def __init__(
        self,
        state: ReplayState,
        mix: Mix,
        sealing: Sealing,
        history: TaskHistory,
        outages: Outages,
        limits: RowLimits | None = None,
    ) -> None:
        self._state, self._mix, self._sealing, self._history = state, mix, sealing, history
        # The bound is the run's, hence the same for all sources.
        self._bound = mix.sources[0].config.bound
        self._outages, self._limits = outages, limits

    def open_group(self, task_id: TaskId, lap: int, now: float) -> None:
        """Open a group of `group_size` pending rollouts of a task."""
        config = self._mix.config_of(task_id)
        ordinal = self._state.next_ordinal
        group_id = GroupId(f"g{ordinal:06d}")
        self._state.put(
            GroupRecord(
                group_id=group_id,
                ordinal=ordinal,
                task_id=task_id,
                state=GroupState.OPEN,
                opened_at_s=now,
                max_evictions=config.max_evictions,
            )
        )
        self._history.opened(task_id, lap)
        for member in range(config.group_size):
            rollout_id = RolloutId(f"{group_id}-{member}")
            self._state.put(
                RolloutRecord(rollout_id=rollout_id, group_id=group_id, member=member, state=RolloutState.PENDING)
            )

    def start(self, rollout: RolloutRecord, version: PolicyVersion, now: float) -> RolloutRecord:
        """Start the next attempt of a pending rollout, which is in flight from then on."""
        attempt = rollout.attempt + 1
        self._state.put(AttemptRecord(rollout_id=rollout.rollout_id, attempt=attempt, version=version, issued_at_s=now))
        return self._state.move(rollout.rollout_id, RolloutState.IN_FLIGHT, attempt=attempt)

    def offer(self, result: RolloutResult, now: float) -> Receipt:
        """Accept a result, or refuse and count it."""
        status = self._judge(result.rollout_id, result.attempt)
        if status is not ReceiptStatus.ACCEPTED:
            if self._sealing.heard((result.rollout_id, result.attempt)):
                self._describe(result)
            self._state.count(f"offers_{status}")
            return Receipt(rollout_id=result.rollout_id, attempt=result.attempt, status=status)
        account = classify(result, self._state.path.tree, limits=self._limits)
        attempt = replace(
            self._state.attempts[result.rollout_id],
            ended_at_s=now,
            offered=True,
            cause=account.outcome.cause,
            reward=account.outcome.reward,
            solved=account.outcome.solved,
            trainable=account.outcome.trainable,
            detail=account.outcome.detail,
            trained=account.trained,
            turns=account.turns,
            phases_s=account.phases_s,
            trace_id=account.trace_id,
            host=account.host,
            scores=account.scores,
            breakdown=account.breakdown,
            timeline=account.timeline,
        )
        self._end(attempt, engine_failed=account.engine_failed, untrainable=account.untrainable)
        return Receipt(rollout_id=attempt.rollout_id, attempt=attempt.attempt, status=status)

    def _describe(self, result: RolloutResult) -> None:
        """Add to an attempt that was cancelled when its group was sealed where its time went: it is a straggler."""
        known = self._state.attempts.get(result.rollout_id)
        if known is not None and known.key == (result.rollout_id, result.attempt):
            account = classify(
                replace(result, outcome=Outcome(reward=None, trainable=False, cause=Cause.CANCELLED)),
                self._state.path.tree,
            )
            self._state.put(
                replace(
                    known,
                    turns=account.turns,
                    phases_s=account.phases_s,
                    trace_id=account.trace_id,
                    host=account.host,
                    breakdown=account.breakdown,
                    timeline=account.timeline,
                )
            )

    def abandon(self, rollout_id: RolloutId, attempt: int, cause: Cause, detail: str, now: float) -> bool:
        """End an attempt that no worker is running any more. Return False when it is not in flight."""
        if self._judge(rollout_id, attempt) is not ReceiptStatus.ACCEPTED:
            self._sealing.heard((rollout_id, attempt))
            return False
        self._state.count("attempts_abandoned")
        self._end(replace(self._state.attempts[rollout_id], ended_at_s=now, cause=cause, detail=detail))
        return True

    def to_cancel(self, version: PolicyVersion) -> tuple[tuple[RolloutId, int], ...]:
        """Return the attempts whose result could not be trained at `version` or later: those in flight that were issued
        at a version over the bound, and those of members that were unfinished when their group was sealed."""
        path = self._state.path
        over_bound = (
            self._state.attempts[rollout_id].key
            for issued_at, rollouts in self._state.in_flight_by_version.items()
            if not self._bound.admits(path.expected_tree, path.horizon(version), (issued_at,))
            for rollout_id in rollouts
        )
        return (*over_bound, *self._sealing.aborted)

    def orphans(self, carried: Collection[tuple[RolloutId, int]]) -> list[tuple[RolloutId, int]]:
        """Return the attempts that are in flight or to be cancelled and are not among `carried`."""
        running = [self._state.attempts[rollout].key for rollout in self._state.by_state[RolloutState.IN_FLIGHT]]
        return [key for key in (*running, *self._sealing.aborted) if key not in carried]

    def _judge(self, rollout_id: RolloutId, attempt: int) -> ReceiptStatus:
        if not isinstance(rollout_id, str) or not isinstance(attempt, Integral):
            return ReceiptStatus.UNKNOWN
        rollout = self._state.rollouts.get(rollout_id)
        if rollout is None:
            # Closed groups are forgotten, but their ids hold their ordinal. Python refuses to parse a number of
            # thousands of digits.
            group, _, member = rollout_id.partition("-")
            known_shape = group.startswith("g") and group[1:].isdecimal() and member.isdecimal() and len(group) < 20
            was_issued = known_shape and int(group[1:]) < self._state.next_ordinal
            return ReceiptStatus.LATE if was_issued else ReceiptStatus.UNKNOWN
        if attempt > rollout.attempt or attempt < 1:
            return ReceiptStatus.UNKNOWN
        if attempt < rollout.attempt:
            return ReceiptStatus.LATE
        if rollout.state is RolloutState.IN_FLIGHT:
            return ReceiptStatus.ACCEPTED
        return ReceiptStatus.DUPLICATE if self._state.attempts[rollout_id].offered else ReceiptStatus.LATE

    def _end(self, attempt: AttemptRecord, *, engine_failed: bool = False, untrainable: bool = False) -> None:
        task_id, now = self._state.group_of(attempt.rollout_id).task_id, attempt.ended_at_s or 0.0
        charge = self._outages.charge(attempt, task_id, engine_failed=engine_failed, untrainable=untrainable, now=now)
        attempt = replace(attempt, charged_to=charge)
        self._state.put(attempt)
        if attempt.cause is Cause.CANCELLED:
            # It is not a failure; one that was over the bound already counts as evicted.
            self._state.count("attempts_cancelled")
            path = self._state.path
            version = path.next_version
            over = version and not self._bound.admits(path.expected_tree, version, (attempt.version,))
            if attempt.offered and version and over:
                evict(self._state, self._history, attempt.rollout_id, version)
            else:
                self._state.put(replace(attempt, detail=attempt.detail or GIVEN_UP))
                self._state.move(attempt.rollout_id, RolloutState.PENDING)
        elif charge is not None:
            self._state.count(f"attempts_{attempt.cause}")
            failures = self._state.rollouts[attempt.rollout_id].failures + (charge in COUNTED)
            poison = failures >= self._mix.config_of(task_id).max_attempts
            state = RolloutState.POISON if poison else RolloutState.PENDING
            self._state.move(attempt.rollout_id, state, failures=failures)
            self._history.failed(task_id, attempt, poison=poison)
        else:
            rollout = self._state.rollouts[attempt.rollout_id]
            first, values = rollout.first_reward, rollout.first_values
            if first is None:
                first, values = attempt.reward, attempt.scores.values or None if attempt.scores else None
            self._state.move(
                rollout.rollout_id,
                RolloutState.WAITING,
                reward=attempt.reward,
                first_reward=first,
                first_values=values,
            )
            self._history.finished(task_id, attempt)
            if self._state.group_of(rollout.rollout_id).state is GroupState.SEALED:
                self._sealing.arrive(rollout.rollout_id)
        self._outages.ended(attempt, task_id, now)
        group = self._state.group_of(attempt.rollout_id)
        if group.state is GroupState.OPEN:
            self._sealing.watch(group.group_id)
        else:
            self._sealing.completed(group.group_id)
