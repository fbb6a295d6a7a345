"""The replay buffer's pure core: a synchronous state machine without clock or I/O.

Invariants:
- Every rollout of an opened group is in exactly one state; nothing is lost and nothing is trained twice on the
  surviving path.
- Every change shows in `drain`: the shell writes what it returns in one transaction before it answers the caller. A
  typed error leaves the core unchanged.
- The core is a cache: folding the ledger's rows gives the same core.
- Trajectories are not here; the shell keeps them by (rollout, attempt).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.buffer.core.acceptance import parse_rule
from headrace.buffer.core.admission import Inventory, groups_to_open
from headrace.buffer.core.batches import BatchBook
from headrace.buffer.core.classification import classify
from headrace.buffer.core.curriculum import TaskCursor
from headrace.buffer.core.groups import GroupBook
from headrace.buffer.core.interventions import Interventions
from headrace.buffer.core.outages import Outages, RecentEnds
from headrace.buffer.core.records import EvaluationRecord, RolloutState, Snapshot
from headrace.buffer.core.sealing import Sealing
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.sanitizer import clean_text, plain_checkpoint, plain_int, plain_version
from headrace.buffer.tasks import TaskId
from headrace.buffer.types import Cause, Receipt, ReceiptStatus, RolloutId, RolloutOrder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from headrace.buffer.core.config import BufferConfig
    from headrace.buffer.core.records import BatchRecord, Record, RolloutRecord
    from headrace.buffer.core.task_stream import TaskStream
    from headrace.buffer.types import BatchId, BatchLease, CheckpointRef, RolloutResult, StepReport
    from headrace.buffer.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """Counts for people and metrics. `rollouts` covers all of the run by state, `counters` what was refused, filtered,
    undone. `parked` are tasks that are not issued any more, with their last failure."""

    head: PolicyVersion | None
    admit: int
    inventory: Inventory
    rollouts: Mapping[RolloutState, int]
    counters: Mapping[str, int]
    steps_committed: int
    steps_skipped: int
    batches_queued: int
    groups_opened: int
    evaluations: int
    chain: str
    parked: Mapping[TaskId, str]
    held: str = ""
    """Why no attempts begin now, empty while they do."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Hosts that fail significantly more often than the others, and why; they get one attempt a minute."""


class ReplayBuffer:
    """Groups in, batches out. `now` is in seconds since the Unix epoch; it is recorded, and decides nothing but when
    rules with times accept."""

    def __init__(self, config: BufferConfig, stream: TaskStream, snapshot: Snapshot | None = None) -> None:
        self.config = config
        self._stream = stream
        self._recent = RecentEnds()
        self.fold(snapshot or Snapshot())

    def fold(self, snapshot: Snapshot) -> None:
        """Replace everything by what the snapshot holds."""
        self.state = ReplayState(snapshot)
        history = TaskHistory(self.state, park_after=self.config.park_after)
        self._sealing = Sealing(self.state, self.config, parse_rule(self.config.rule), history)
        self._outages = Outages(self.state, history, self._recent)
        self._groups = GroupBook(self.state, self.config, self._sealing, history, self._outages)
        self._batches = BatchBook(self.state, self.config, history)
        self._interventions = Interventions(self.state, self._sealing, history)
        self._cursor = TaskCursor(
            self.state, self._stream, curriculum=self.config.curriculum, passes=self.config.passes
        )

    def restart_clocks(self, now: float) -> None:
        """The store was opened again: groups that are open wait for their `deadline` and `grace` from now on, whatever
        the stop took."""
        self._sealing.restart_clocks(now)

    def tick(self, now: float) -> None:
        """Seal what is due by now; `issue`, `offer`, `take` and `commit` do it too."""
        self._sealing.tick(now)

    def due_at(self) -> float | None:
        """When `tick` will next have something to do if nothing happens before."""
        return self._sealing.due_at()

    def drain(self) -> tuple[Record, ...]:
        """The records that changed since the last call."""
        return self.state.drain()

    def inventory(self, in_flight: int | None = None) -> Inventory:
        """Rollouts in stock; `in_flight` counts if it is more than the ledger knows of."""
        size = {state: len(rollouts) for state, rollouts in self.state.by_state.items()}
        return Inventory(
            pending=size[RolloutState.PENDING],
            in_flight=max(size[RolloutState.IN_FLIGHT], in_flight or 0),
            waiting=size[RolloutState.WAITING],
            sealed=size[RolloutState.SEALED],
            leased=size[RolloutState.LEASED],
        )

    def admit(self, in_flight: int | None = None) -> int:
        """How many rollouts may start now: pending ones, and whole new groups for which there is room."""
        stock = self.inventory(in_flight)
        allowed = stock.pending + self._groups_to_open(stock) * self.config.group_size
        cap = self.config.max_in_flight
        return allowed if cap is None else max(0, min(allowed, cap - stock.in_flight))

    def issue(self, limit: int, version: PolicyVersion, now: float) -> tuple[RolloutOrder, ...]:
        """Up to `limit` attempts to run, at most `admit()`: pending rollouts first, those issued again before all
        others, then new groups.

        `version` is the one the engines serve; none while it `may_begin` nothing. In an outage none, or a probe.
        """
        version = plain_version(version)
        self.tick(now)
        allowed = self._outages.allowed(now)
        if allowed == 0 or not self.may_begin(version):
            return ()
        orders: list[RolloutOrder] = []
        for _ in range(min(limit, self.admit(), limit if allowed is None else allowed)):
            rollout = self._next_rollout(now)
            if rollout is None:
                break
            avoid = self._outages.avoided(self.state.attempts.get(rollout.rollout_id), now)
            orders.append(replace(self._order(self._groups.start(rollout, version, now)), avoid=avoid))
        if orders:
            self._outages.began(now)
        return tuple(orders)

    def engines(self, *, serving: bool, now: float) -> None:
        """Whether an engine serves from now on: while none does, no attempt begins and no task is charged.
        Idempotent."""
        self._outages.engines(serving=serving, now=now)

    def wakes_at(self, now: float) -> float | None:
        """When `issue` may have an order that no change brings: a probe of a failing system."""
        return self._outages.wakes_at(now)

    def may_begin(self, version: PolicyVersion) -> bool:
        """Whether attempts may begin with `version`, which the engines serve: it is within the bound of the first
        version at which they could be trained, as after a fork it need not be. In mode `sync` it has its weights."""
        head = self.state.head
        if head is None:
            return False
        bound = 0 if self.config.mode == "sync" else self.config.max_staleness
        return self.state.staleness(self.state.horizon(head), version) <= bound

    def lies_ahead(self, version: PolicyVersion) -> bool:
        """Whether the batches issued again lead to the weights of `version`, and are not there yet: engines that serve
        them need not be pushed to."""
        return self.state.lies_ahead(version)

    def offer(self, result: RolloutResult, now: float) -> Receipt:
        """Take in what became of an attempt; idempotent by (rollout, attempt). Late, repeated and unknown ones are
        counted."""
        self.tick(now)
        receipt = self._groups.offer(result, now)
        self.tick(now)
        return receipt

    def abandon(self, attempts: Iterable[tuple[RolloutId, int]], now: float) -> int:
        """The runner of these attempts is gone: they count as infra failures. Returns how many were in flight."""
        return self._abandon(attempts, Cause.INFRA, "abandoned: its worker is gone", now)

    def withdraw(self, attempts: Iterable[tuple[RolloutId, int]], now: float) -> int:
        """These attempts run nowhere, and never did as far as they are concerned: their order, dispatcher or driver
        was lost. No failure counts. Returns how many were in flight."""
        return self._abandon(attempts, Cause.CANCELLED, "withdrawn: nobody runs it", now)

    def keep_in_flight(self, carried: Collection[tuple[RolloutId, int]], now: float) -> int:
        """`withdraw` every attempt in flight that is not `carried`; returns how many."""
        return self.withdraw(self._groups.carried_by_nobody(carried), now)

    def to_cancel(self, version: PolicyVersion) -> tuple[tuple[RolloutId, int], ...]:
        """Attempts in flight that could not be trained at `version` or later, judged by the version they were issued
        at, and attempts of members that their group was sealed without."""
        return self._groups.to_cancel(version)

    def take(self, version: PolicyVersion, epoch: int, now: float) -> BatchRecord | None:
        """Lease the next batch, to be trained at `version`; a repeated call gives the same lease. Raises StaleEpoch,
        VersionMismatch, DataExhausted, BatchUntrainable."""
        version = plain_version(version)
        if (lease := self._batches.lease_at(version, epoch)) is not None:
            return lease
        self._batches.refuse_untrainable()
        before = self.state.changes_made
        self.tick(now)
        record = self._batches.take(version, epoch, now)
        # An error must leave the core unchanged: what the sweep did is told first, and the next call raises.
        if record is None and self.state.changes_made == before and self._cursor.left() == 0:
            self._batches.refuse_exhausted()
        return record

    def commit(self, lease: BatchLease, report: StepReport, now: float) -> None:
        """The step is done; idempotent by batch id. Raises StaleEpoch, LeaseError, VersionMismatch."""
        self._batches.commit(lease, report, now)
        self.tick(now)

    def step_failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        """A step on this batch failed. Why it may not be tried again, empty when it may: with `again` that try begins
        now, else with the next learner. Raises StaleEpoch, LeaseError."""
        return self._batches.step_failed(lease, reason, again=again)

    def step_interrupted(self, lease: BatchLease) -> None:
        """The step on this batch ended for a reason that is not the batch's. Raises StaleEpoch, LeaseError."""
        self._batches.step_interrupted(lease)

    def retry_batches(self) -> None:
        """For an operator: what ended learners is no more, and all batches are tried anew."""
        self._batches.retry_batches()

    def release(self, lease: BatchLease) -> None:
        """Give a batch back before its step began. Raises StaleEpoch, LeaseError."""
        self._batches.release(lease)

    def checkpointed(self, ref: CheckpointRef, now: float) -> None:
        """A checkpoint directory is durable; idempotent. Raises StaleEpoch, LedgerMismatch."""
        self._batches.checkpointed(plain_checkpoint(ref), now)

    def open_epoch(self, checkpoint: CheckpointRef | None, now: float, *, from_start: bool = False) -> PolicyVersion:
        """A new learner incarnation; older leases end, steps after the checkpoint are undone. Raises LedgerMismatch,
        LedgerBehind, CheckpointMissing when it is None where one was recorded, and not `from_start`."""
        return self._batches.open_epoch(checkpoint and plain_checkpoint(checkpoint), now, from_start=from_start)

    def refuse_without_checkpoint(self) -> None:
        """Raises CheckpointMissing when a learner cannot open without a checkpoint."""
        self._batches.refuse_without_checkpoint()

    def needs_history(self, checkpoint: CheckpointRef | None) -> bool:
        """Whether `open_epoch` needs what the ledger's archive holds: `Ledger.recall`, then `fold`."""
        return self._batches.needs_history(checkpoint)

    def trained_after(self, checkpoint: CheckpointRef | None) -> set[RolloutId]:
        """Rollouts of the steps that opening at `checkpoint` undoes, as far as their batches are known here. Raises
        LedgerMismatch, LedgerBehind."""
        return self._batches.trained_after(checkpoint)

    def drop_batch(self, batch_id: BatchId | None, now: float) -> BatchRecord:
        """For an operator, while no learner lives: drop a batch that is leased or waits to be issued again; None: the
        one leased. Raises LeaseError."""
        return self._interventions.drop_batch(batch_id, now)

    def retry_lost(self, lost: Mapping[RolloutId, str], now: float) -> tuple[RolloutId, ...]:
        """For an operator, while no learner lives: issue rollouts whose results are lost (and why) again; returns those
        that were not trained yet. Steps on them must have been undone where a new learner would train them again."""
        return self._interventions.retry_lost(lost, now)

    def unpark(self, tasks: Sequence[str] | None, now: float) -> tuple[TaskId, ...]:
        """For an operator: issue parked tasks again, with a clean record; None: all. Raises TaskNotParked, with nothing
        changed."""
        return self._interventions.unpark(tasks, now)

    def record_evaluation(
        self, result: RolloutResult, task_id: TaskId, tag: str, version: PolicyVersion, now: float
    ) -> Receipt:
        """Keep the outcome of an evaluation rollout asked for at `version`; idempotent by (rollout, attempt)."""
        try:
            rollout_id, attempt = RolloutId(clean_text(result.rollout_id)), plain_int(result.attempt)
        except (TypeError, ValueError):
            self.state.count("evaluations_unknown")
            return Receipt(rollout_id=result.rollout_id, attempt=result.attempt, status=ReceiptStatus.UNKNOWN)
        version = plain_version(version)
        if (rollout_id, attempt) in self.state.evaluations:
            self.state.count("evaluations_duplicate")
            return Receipt(rollout_id=rollout_id, attempt=attempt, status=ReceiptStatus.DUPLICATE)
        account = classify(result, self.state.tree, masked=True)
        self.state.put(
            EvaluationRecord(
                rollout_id=rollout_id,
                attempt=attempt,
                task_id=TaskId(clean_text(task_id)),
                tag=clean_text(tag),
                version=version,
                cause=account.outcome.cause,
                reward=account.outcome.reward,
                solved=account.outcome.solved,
                detail=account.outcome.detail,
                sampled=account.trained,
                recorded_at_s=now,
            )
        )
        return Receipt(rollout_id=rollout_id, attempt=attempt, status=ReceiptStatus.ACCEPTED)

    def status(self) -> BufferStatus:
        """Counts by state, of closed groups too."""
        rollouts = Counter(self.state.closed)
        rollouts.update({state: len(ids) for state, ids in self.state.by_state.items()})
        skipped = self.state.steps_skipped
        return BufferStatus(
            head=self.state.head,
            admit=self.admit(),
            inventory=self.inventory(),
            rollouts=dict(rollouts),
            counters=dict(self.state.counters),
            steps_committed=self.state.steps_closed + len(self.state.commits) - skipped,
            steps_skipped=skipped,
            batches_queued=len(self.state.queue()),
            groups_opened=self.state.next_ordinal,
            evaluations=self.state.evaluations_closed + len(self.state.evaluations),
            chain=self.state.chain,
            parked=dict(self.state.parked),
            held=self._outages.held(),
            suspects=dict(self._outages.suspects()),
        )

    def _abandon(self, attempts: Iterable[tuple[RolloutId, int]], cause: Cause, detail: str, now: float) -> int:
        ended = sum(self._groups.abandon(*attempt, cause, detail, now) for attempt in attempts)
        self.tick(now)
        return ended

    def _groups_to_open(self, stock: Inventory) -> int:
        if self.config.mode == "one-step-off":
            # The batch that is being trained is none that must be filled.
            stock = replace(stock, leased=0)
        room = groups_to_open(
            stock,
            batch_size=self.config.batch_size,
            group_size=self.config.group_size,
            max_staleness=self.config.max_staleness,
            sync=self.config.mode != "async",
        )
        left = self._cursor.left()
        return room if left is None else min(room, left)

    def _next_rollout(self, now: float) -> RolloutRecord | None:
        """The one whose attempt is next. A probe is of a task that did not fail lately, if there is one."""
        spared = self._outages.to_spare()
        if not spared:
            return self.state.next_pending() or self._open_group(now)
        fresh = self.state.next_pending_but(spared)
        if fresh is None and self._groups_to_open(self.inventory()) and self._open_group(now) is not None:
            fresh = self.state.next_pending_but(spared)
        return fresh or self.state.next_pending()

    def _open_group(self, now: float) -> RolloutRecord | None:
        """The first rollout of a new group; None at the end of the data."""
        following = self._cursor.next()
        if following is None:
            return None
        self._groups.open_group(*following, now)
        return self.state.next_pending()

    def _order(self, rollout: RolloutRecord) -> RolloutOrder:
        group = self.state.groups[rollout.group_id]
        return RolloutOrder(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            attempt=rollout.attempt,
            task_id=group.task_id,
        )
