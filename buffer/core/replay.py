"""The replay buffer's pure core: a synchronous state machine without clock or I/O.

Invariants:
- Every rollout of an opened group is in exactly one state; nothing is lost and nothing is trained twice on the
  surviving path.
- `drain` returns every change: the shell writes the returned records in one transaction before it answers the caller.
  A typed error leaves the core unchanged.
- The core is a cache: folding the ledger's rows gives the same core.
- Pacing is computed from the current inventory; there is no counter that could drift. In mode `async` the inventory
  never exceeds the stock that can still be trained within the bound; in mode `sync`, only as many rollouts are
  started as the current batch still needs.
- The core has no trajectories; the shell stores them by (rollout, attempt).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.buffer.core.batch_queue import BatchQueue
from headrace.buffer.core.batches import BatchBook
from headrace.buffer.core.classification import classify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskCursor, TaskStream
from headrace.buffer.core.epochs import Epochs
from headrace.buffer.core.groups import GroupBook
from headrace.buffer.core.interventions import Interventions
from headrace.buffer.core.outages import Outages, RecentEnds
from headrace.buffer.core.records import BatchRecord, EvaluationRecord, Record, RolloutRecord, RolloutState, Snapshot
from headrace.buffer.core.sealing import Sealing
from headrace.buffer.core.staleness import StalenessBound
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.core.task_sources.admission import GroupAdmission
from headrace.buffer.core.task_sources.shares import Mix, Source
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.sanitizer import clean_text, plain_int, plain_version
from headrace.buffer.trajectories.types import (
    BatchLease,
    Cause,
    CheckpointRef,
    Receipt,
    ReceiptStatus,
    RolloutId,
    RolloutOrder,
    RolloutResult,
    StepReport,
)
from headrace.buffer.trajectories.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Rollouts in stock, by state."""

    pending: int
    in_flight: int
    waiting: int
    sealed: int
    leased: int

    @property
    def total(self) -> int:
        """Number of rollouts in stock. Pending ones count, because their groups are open and they will run."""
        return self.pending + self.in_flight + self.waiting + self.sealed + self.leased


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """Copies of the ledger to storage so far. `version` is the checkpoint of the newest complete copy, None before the
    first; `error` says why the copy for `failed` has failed since, and is empty otherwise. Times are Unix seconds."""

    version: str | None = None
    at_s: float | None = None
    failed: str | None = None
    failed_at_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """Status of one source of tasks. `share` and `realised` are the wanted and the realised share of the `trained`
    rollouts, `realised` None before the first. `ready` counts sealed rollouts that are in no batch, `lacking` those
    that the next batch still waits for. `usable` is the share of its ended rollouts that were trained, by which those
    in progress count. `failing` is the reason why the source gets only one probe a minute, empty if
    it does not fail."""

    share: float
    trained: int
    realised: float | None
    in_flight: int
    ready: int
    lacking: int
    usable: float
    failing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """Counts for people and metrics. `rollouts` counts all rollouts of the run by state; `counters` counts events:
    offers refused, rollouts filtered, batches rolled back and others. `parked` are tasks that are no longer issued,
    with their last failure."""

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
    """Reason why no attempts may begin now; empty while they may."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Hosts that fail significantly more often than the others, with the reason; they get one attempt a minute."""
    ledger_copy: CopyOutcome | None = None
    """Copies of the ledger; None if the run makes none."""
    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    """Status of each source of tasks; empty in a run without sources."""


class ReplayBuffer:
    """Opens groups, takes in results, and gives out batches. `now` is in seconds since the Unix epoch. It is
    recorded, and used by rules with timers and by outages. Results over the `limits` of the learner count as failures.

    `batches` and `epochs` face the learner, `operators` faces operators; `outages` limits what may begin."""

    def __init__(
        self,
        config: BufferConfig,
        stream: TaskStream,
        snapshot: Snapshot | None = None,
        *,
        limits: RowLimits | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        """`sources` are those of the tasks in `stream`; without any, all tasks are of one."""
        self.config, self.mix = config, Mix(config, sources)
        self._limits = limits
        self._streams = {source.name: stream.of_source(source.name) for source in self.mix.sources}
        self._recent = RecentEnds([source.name for source in sources])
        self.fold(snapshot or Snapshot())

    def fold(self, snapshot: Snapshot) -> None:
        """Replace the whole state with that of a snapshot."""
        self.state = ReplayState(snapshot, tuple(self._streams))
        history = TaskHistory(self.state, park_after=self.config.park_after)
        self._sealing = Sealing(self.state, self.mix, history)
        self.outages = Outages(self.state, history, self._recent)
        self._groups = GroupBook(self.state, self.mix, self._sealing, history, self.outages, self._limits)
        queue = BatchQueue(self.state, self.config, history)
        self.epochs = Epochs(self.state, queue)
        self.batches = BatchBook(self.state, self.config, self.mix, history, self.epochs)
        self.operators = Interventions(self.state, queue, self._sealing, history)
        self._cursors = {
            name: TaskCursor(self.state, stream, curriculum=self.config.curriculum, passes=self.config.passes)
            for name, stream in self._streams.items()
        }
        self._admission = GroupAdmission(self.state, self.config, self.mix, self._cursors)

    def restart_clocks(self, now: float) -> None:
        """Restart the timers that `deadline` and `grace` use in open groups, because the store has been reopened and
        the time during which it was stopped must not count."""
        self._sealing.restart_clocks(now)

    def tick(self, now: float) -> None:
        """Seal the groups that are due; `issue`, `offer`, `take` and `commit` do this too."""
        self._sealing.tick(now)

    def due_at(self) -> float | None:
        """Return when `tick` will next have something to do if nothing happens first."""
        return self._sealing.due_at()

    def drain(self) -> tuple[Record, ...]:
        """Return the records that changed since the last call."""
        return self.state.drain()

    def inventory(self, in_flight: int | None = None) -> Inventory:
        """Return the rollouts in stock. If `in_flight` is given, it replaces the number of rollouts in flight that the
        ledger knows of, unless that is larger."""
        size = {state: len(rollouts) for state, rollouts in self.state.by_state.items()}
        return Inventory(
            pending=size[RolloutState.PENDING],
            in_flight=max(size[RolloutState.IN_FLIGHT], in_flight or 0),
            waiting=size[RolloutState.WAITING],
            sealed=size[RolloutState.SEALED],
            leased=size[RolloutState.LEASED],
        )

    def admit(self, in_flight: int | None = None) -> int:
        """Return how many rollouts may start now: pending ones, and whole new groups for which there is room."""
        stock = self.inventory(in_flight)
        unknown = stock.in_flight - len(self.state.by_state[RolloutState.IN_FLIGHT])
        allowed = stock.pending + self._admission.room(unknown)
        cap = self.config.max_in_flight
        return allowed if cap is None else max(0, min(allowed, cap - stock.in_flight))

    def issue(self, limit: int, version: PolicyVersion, now: float) -> tuple[RolloutOrder, ...]:
        """Issue up to `limit` attempts, but no more than `admit()` allows: pending rollouts first, those issued again
        before all others, then new groups.

        `version` is the one the engines serve; nothing is issued while no attempt `may_begin` with it. During an outage
        at most one probe is issued.
        """
        version = plain_version(version)
        self.tick(now)
        allowed = self.outages.allowed(now)
        if allowed == 0 or not self.may_begin(version):
            return ()
        orders: list[RolloutOrder] = []
        for _ in range(min(limit, self.admit(), limit if allowed is None else allowed)):
            rollout = self._next_rollout(now)
            if rollout is None:
                break
            avoid = self.outages.avoided(self.state.attempts.get(rollout.rollout_id), now)
            started = self._groups.start(rollout, version, now)
            self.outages.began_of(self.state.source_of(started), now)
            orders.append(
                RolloutOrder(
                    rollout_id=started.rollout_id,
                    group_id=started.group_id,
                    attempt=started.attempt,
                    task_id=self.state.groups[started.group_id].task_id,
                    avoid=avoid,
                )
            )
        if orders:
            self.outages.began(now)
        return tuple(orders)

    def engines(self, *, serving: bool, now: float) -> None:
        """Record whether any engine is serving from now on: while none is, no attempt begins and no task is charged.
        Idempotent."""
        self.outages.engines(serving=serving, now=now)

    def may_begin(self, version: PolicyVersion) -> bool:
        """Return whether attempts may begin with `version`, which the engines serve: it must be within the bound at the
        first version at which the attempts could be trained, which may not be the case after a fork. In mode `sync` it
        must have the weights of that version."""
        path = self.state.path
        if path.head is None:
            return False
        bound = StalenessBound(0) if self.config.mode == "sync" else self.config.bound
        return bound.admits(path.expected_tree, path.horizon(path.head), (version,))

    def offer(self, result: RolloutResult, now: float) -> Receipt:
        """Take in the result of an attempt; idempotent by (rollout, attempt). Late, repeated and unknown results are
        refused and counted."""
        self.tick(now)
        receipt = self._groups.offer(result, now)
        self.tick(now)
        return receipt

    def abandon(self, attempts: Iterable[tuple[RolloutId, int]], now: float) -> int:
        """Record attempts as infrastructure failures because their runner is gone. Return how many were in flight."""
        return self._abandon(attempts, Cause.INFRA, "abandoned: its worker is gone", now)

    def withdraw(self, attempts: Iterable[tuple[RolloutId, int]], now: float) -> int:
        """End attempts that no runner received, because their order, dispatcher or driver was lost. They do not count
        as failures. Return how many were in flight."""
        return self._abandon(attempts, Cause.CANCELLED, "withdrawn: nobody runs it", now)

    def keep_in_flight(self, carried: Collection[tuple[RolloutId, int]], now: float) -> int:
        """Withdraw every attempt in flight that is not in `carried`. Return how many were withdrawn."""
        return self.withdraw(self._groups.orphans(carried), now)

    def to_cancel(self, version: PolicyVersion) -> tuple[tuple[RolloutId, int], ...]:
        """Return the attempts whose result could not be trained at `version` or later: those issued at a version over
        the bound, and those of members that were unfinished when their group was sealed."""
        return self._groups.to_cancel(version)

    def take(self, version: PolicyVersion, epoch: int, now: float) -> BatchRecord | None:
        """Lease the next batch, to be trained at `version`; a repeated call returns the same lease. Raises StaleEpoch,
        VersionMismatch, DataExhausted, BatchUntrainable."""
        version = plain_version(version)
        if (lease := self.batches.lease_at(version, epoch)) is not None:
            return lease
        self.epochs.queue.refuse_untrainable()
        before = self.state.changes_made
        self.tick(now)
        record = self.batches.take(version, epoch, now)
        # An error must leave the core unchanged: after evictions this call returns None, and the next one raises.
        if record is None and self.state.changes_made == before:
            for name, cursor in self._cursors.items():
                if cursor.left() == 0:
                    self.batches.refuse_exhausted(name)
        return record

    def commit(self, lease: BatchLease, report: StepReport, now: float) -> None:
        """Record the step on a batch; idempotent by batch id. Raises StaleEpoch, LeaseError, VersionMismatch."""
        self.batches.commit(lease, report, now)
        self.tick(now)

    def open_epoch(self, checkpoint: CheckpointRef | None, now: float, *, from_start: bool = False) -> PolicyVersion:
        """Open a learner incarnation at `checkpoint`: older leases end, later steps are undone. Return its first
        version. Raises LedgerMismatch, LedgerBehind, and CheckpointMissing when `checkpoint` is None although one has
        been recorded, unless `from_start`."""
        return self.epochs.open(checkpoint, now, from_start=from_start)

    def record_evaluation(
        self, result: RolloutResult, task_id: TaskId, tag: str, version: PolicyVersion, now: float
    ) -> Receipt:
        """Record the outcome of an evaluation rollout requested at `version`; idempotent by (rollout, attempt)."""
        try:
            rollout_id, attempt = RolloutId(clean_text(result.rollout_id)), plain_int(result.attempt)
        except (TypeError, ValueError):
            self.state.count("evaluations_unknown")
            return Receipt(rollout_id=result.rollout_id, attempt=result.attempt, status=ReceiptStatus.UNKNOWN)
        version = plain_version(version)
        if (rollout_id, attempt) in self.state.evaluations:
            self.state.count("evaluations_duplicate")
            return Receipt(rollout_id=rollout_id, attempt=attempt, status=ReceiptStatus.DUPLICATE)
        account = classify(result, self.state.path.tree, masked=True)
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
                host=account.host,
                trace_id=account.trace_id,
                breakdown=account.breakdown,
                timeline=account.timeline,
            )
        )
        return Receipt(rollout_id=rollout_id, attempt=attempt, status=ReceiptStatus.ACCEPTED)

    def status(self) -> BufferStatus:
        """Return the status of the buffer; its counts include closed groups."""
        rollouts = Counter(self.state.closed)
        rollouts.update({state: len(ids) for state, ids in self.state.by_state.items()})
        path = self.state.path
        return BufferStatus(
            head=path.head,
            admit=self.admit(),
            inventory=self.inventory(),
            rollouts=dict(rollouts),
            counters=dict(self.state.counters),
            steps_committed=path.steps_closed + len(path.commits) - path.steps_skipped,
            steps_skipped=path.steps_skipped,
            batches_queued=len(path.queue()),
            groups_opened=self.state.next_ordinal,
            evaluations=self.state.evaluations_closed + len(self.state.evaluations),
            chain=path.chain,
            parked=dict(self.state.parked),
            held=self.outages.held(),
            sources=self.source_statuses(),
            suspects=dict(self.outages.suspects()),
        )

    def _abandon(self, attempts: Iterable[tuple[RolloutId, int]], cause: Cause, detail: str, now: float) -> int:
        ended = sum(self._groups.abandon(*attempt, cause, detail, now) for attempt in attempts)
        self.tick(now)
        return ended

    def source_statuses(self) -> dict[str, SourceStatus]:
        """Return the status of each source of tasks; empty in a run without sources."""
        if not self.mix.is_named:
            return {}
        trained = {name: self.state.ended(name, RolloutState.TRAINED) for name in self.state.sources}
        lacking, failing = self.batches.waits_for(), self.outages.failing_sources()
        return {
            source.name: SourceStatus(
                share=source.share,
                trained=trained[source.name],
                realised=trained[source.name] / sum(trained.values()) if any(trained.values()) else None,
                in_flight=self.state.stock[source.name][RolloutState.IN_FLIGHT],
                ready=self.state.free[source.name],
                lacking=lacking.get(source.name, 0),
                usable=self._admission.yield_of(source),
                failing=failing.get(source.name, ""),
            )
            for source in self.mix.sources
        }

    def _next_rollout(self, now: float) -> RolloutRecord | None:
        """Return the rollout to issue next. A probe uses a task that has not failed recently, if there is one."""
        spared, held = self.outages.to_spare(), self.outages.held_sources(now)
        if not spared and not held:
            return self.state.next_pending() or self._open_group(held, now)
        fresh = self.state.next_pending_but(spared, held)
        if fresh is None and self._open_group(held, now) is not None:
            fresh = self.state.next_pending_but(spared, held)
        return fresh or self.state.next_pending_but((), held)

    def _open_group(self, held: Collection[str], now: float) -> RolloutRecord | None:
        """Open a new group and return its first rollout; None if there is no room, or at the end of the data."""
        source = self._admission.next_source(held)
        following = None if source is None else self._cursors[source.name].next()
        if following is None:
            return None
        self._groups.open_group(*following, now)
        return self.state.next_pending()
