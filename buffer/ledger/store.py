"""The replay buffer with its ledger: the async shell around the core.

Invariants:
- Nothing is answered before it is durable. Calls that arrive while a transaction is being written share the next one
  (group commit).
- The core is never ahead of the disk for long: when a write fails, whatever the reason, or the core breaks off
  half-way, the store has ended and every later call raises LedgerBroken. Who opens it again folds it from the disk.
- Texts and numbers are cleaned or refused before the core changes (`classification`, `cleaning`): one result that
  cannot be stored costs no other.
- All SQLite work runs in one thread; the event loop never waits for the disk. In memory it runs in place (virtual time
  has no threads).
- A typed error of the core changes nothing and ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.errors import LedgerBroken, LedgerMismatch, ReplayError
from headrace.buffer.ledger.ledger import TRAJECTORY_FILE_BYTES, Ledger, StoredTrajectory
from headrace.buffer.types import Batch, BatchItem, BatchLease, ReceiptStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self, TypeVar

    from headrace.buffer.core.config import BufferConfig
    from headrace.buffer.core.records import BatchRecord, EvaluationRecord, Snapshot
    from headrace.buffer.core.replay import BufferStatus
    from headrace.buffer.tasks import Task, TaskId
    from headrace.buffer.types import (
        BatchId,
        CheckpointRef,
        Receipt,
        RolloutId,
        RolloutOrder,
        RolloutResult,
        StepReport,
    )
    from headrace.buffer.versions import PolicyVersion

    T = TypeVar("T")


SHORTEST_WAIT_S = 0.001
"""The clock may be coarser than the loop's: a group that is nearly due is not asked for in a tight loop."""

logger = logging.getLogger(__name__)


class ReplayStore:
    """Made by `open`; an async context manager. `clock` gives seconds since the Unix epoch."""

    def __init__(
        self, core: ReplayBuffer, ledger: Ledger, executor: ThreadPoolExecutor | None, clock: Callable[[], float]
    ) -> None:
        self._core, self._ledger, self._executor, self._clock = core, ledger, executor, clock
        self._copier = executor and ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-copy")
        self._stored: list[StoredTrajectory] = []
        self._writing = asyncio.Lock()
        self._applied = self._durable = 0
        self._changed = asyncio.Event()
        self._broken: str | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        run_dir: Path | None,
        config: BufferConfig,
        tasks: Sequence[Task],
        *,
        run_id: str,
        seed: int,
        clock: Callable[[], float] = time.time,
        trajectory_file_bytes: int = TRAJECTORY_FILE_BYTES,
    ) -> Self:
        """Open or create the ledger in `run_dir` (None: in memory) and fold the core from it. Raises LedgerRefused,
        LedgerInUse."""
        stream = TaskStream(tasks, seed=seed)
        identity = {"run_id": run_id, "tasks_sha256": stream.digest()}
        if run_dir is None:
            ledger = Ledger.in_memory(identity)
            return cls(ReplayBuffer(config, stream, ledger.load()), ledger, None, clock)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        loop = asyncio.get_running_loop()
        try:
            ledger = await loop.run_in_executor(
                executor, lambda: Ledger.open(run_dir, identity, trajectory_file_bytes=trajectory_file_bytes)
            )
            snapshot = await loop.run_in_executor(executor, ledger.load_or_close)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        store = cls(ReplayBuffer(config, stream, snapshot), ledger, executor, clock)
        store._apply(lambda: store._core.restart_clocks(clock()))
        return store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for a running transaction and close the files; idempotent. Later calls raise LedgerBroken."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._broken is None:
                await self._flush()
        finally:
            # Also when that fails: the lock must not outlive the store.
            self._end("the store is closed")
            async with self._writing:
                await self._in_thread(self._ledger.close)
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            if self._copier is not None:
                self._copier.shutdown(wait=False)

    async def issue(self, limit: int, version: PolicyVersion, *, timeout_s: float = 0.0) -> tuple[RolloutOrder, ...]:
        """Up to `limit` attempts to run, durable. Waits up to `timeout_s` for at least one; `version` is what the
        engines serve, and none begins with it while it is over the bound (`may_begin`)."""
        handed: list[tuple[RolloutId, int]] = []

        def issue() -> tuple[RolloutOrder, ...] | None:
            orders = self._core.issue(limit, version, self._clock())
            handed.extend((order.rollout_id, order.attempt) for order in orders)
            return orders or None

        try:
            return await self._until(issue, timeout_s) or ()
        except asyncio.CancelledError:
            # Nobody will run what a cancelled caller never received.
            self._apply(lambda: self._core.withdraw(handed, self._clock()))
            raise

    async def offer_many(self, results: Sequence[RolloutResult]) -> tuple[Receipt, ...]:
        """Take in finished attempts, durable when this returns; one receipt each, in order."""

        def offer_all() -> tuple[Receipt, ...]:
            now = self._clock()
            return tuple(self._offer(result, now) for result in results)

        return await self._change(offer_all)

    async def abandon(self, attempts: Sequence[tuple[RolloutId, int]]) -> int:
        """The runner of these attempts is gone; returns how many were in flight."""
        return await self._change(lambda: self._core.abandon(attempts, self._clock()))

    async def keep_in_flight(self, carried: Collection[tuple[RolloutId, int]]) -> int:
        """Withdraw every attempt in flight that nobody carries any more; returns how many."""
        return await self._change(lambda: self._core.keep_in_flight(carried, self._clock()))

    async def engines(self, *, serving: bool) -> None:
        """Whether an engine serves from now on, durable: while none does, no attempt begins. Idempotent."""
        await self._change(lambda: self._core.engines(serving=serving, now=self._clock()))

    async def take(self, version: PolicyVersion, epoch: int, *, timeout_s: float) -> Batch | None:
        """Lease the next batch, to be trained at `version`; waits up to `timeout_s`, then None. Repeating it is safe.

        Raises StaleEpoch (also while waiting, when a newer learner opens), VersionMismatch, DataExhausted."""
        record = await self._until(lambda: self._core.take(version, epoch, self._clock()), timeout_s)
        return None if record is None else await self._batch(record)

    async def commit(self, lease: BatchLease, report: StepReport) -> None:
        """The step is done; durable when this returns. Raises StaleEpoch, LeaseError, VersionMismatch."""
        await self._change(lambda: self._core.commit(lease, report, self._clock()))

    async def step_failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        """A step on this batch failed; why it is not tried again, empty when it is. Durable when this returns. Raises
        StaleEpoch, LeaseError."""
        return await self._change(lambda: self._core.batches.step_failed(lease, reason, again=again))

    async def step_interrupted(self, lease: BatchLease) -> None:
        """The step on this batch ended by no fault of it. Raises StaleEpoch, LeaseError."""
        await self._change(lambda: self._core.batches.step_interrupted(lease))

    async def retry_batches(self) -> None:
        """For an operator, while no learner lives: try all batches anew."""
        await self._change(self._core.operators.retry_batches)

    async def release(self, lease: BatchLease) -> None:
        """Give a batch back before its step began. Raises StaleEpoch, LeaseError."""
        await self._change(lambda: self._core.batches.release(lease))

    async def checkpointed(self, ref: CheckpointRef) -> None:
        """A checkpoint directory is durable. Raises StaleEpoch, LedgerMismatch."""
        await self._change(lambda: self._core.epochs.checkpointed(ref, self._clock()))
        await self._archive()
        await self._in_thread(lambda: self._back_up_beside(Path(ref.path)), self._copier)
        if not self._core.config.keep_trajectories:
            await self._write_alone(self._ledger.drop_covered)

    async def _archive(self) -> None:
        """Move what the checkpoint closed to the archive, a little at a time: offers go on in between."""
        while await self._write_alone(self._ledger.archive_groups):
            pass
        self._core.state.path.forget_steps(*await self._write_alone(self._ledger.archive_steps))
        self._core.state.forget_evaluations(await self._write_alone(self._ledger.archive_evaluations))

    async def _write_alone(self, work: Callable[[], T]) -> T:
        """Work on the ledger between two transactions."""
        async with self._writing:
            self._check()
            with self._ending_on_failure():
                return await self._in_thread(work)

    def _back_up_beside(self, checkpoint: Path) -> None:
        """A copy of the ledger in the checkpoint's directory, for a node whose disk is lost. It does without when the
        directory is not here or takes no more: the checkpoint itself is whole."""
        if not checkpoint.is_dir():
            return
        try:
            self._ledger.backup(checkpoint / "ledger.db")
        except (OSError, sqlite3.Error) as error:
            logger.warning("no copy of the ledger in %s: %s", checkpoint, error)

    async def open_epoch(self, checkpoint: CheckpointRef | None, *, from_start: bool = False) -> PolicyVersion:
        """A new learner incarnation starts at `checkpoint`; returns its first version. Raises LedgerMismatch,
        LedgerBehind, CheckpointMissing."""
        self._check()
        if checkpoint is None and not from_start:
            # Before anything is recalled for it.
            self._core.epochs.refuse_without_checkpoint()
        if self._core.epochs.needs_history(checkpoint):
            await self._recall_steps_after(checkpoint)
        return await self._change(lambda: self._core.open_epoch(checkpoint, self._clock(), from_start=from_start))

    async def drop_batch(self, batch_id: BatchId | None = None) -> BatchRecord:
        """For an operator, while no learner lives: drop a batch for good, by default the one leased. Raises
        LeaseError."""
        return await self._change(lambda: self._core.operators.drop_batch(batch_id, self._clock()))

    async def unpark(self, tasks: Sequence[str] | None) -> tuple[TaskId, ...]:
        """For an operator: issue parked tasks again, all when None. Raises TaskNotParked."""
        return await self._change(lambda: self._core.operators.unpark(tasks, self._clock()))

    async def retry_lost(
        self, lost: Mapping[RolloutId, str], checkpoint: CheckpointRef | None
    ) -> tuple[RolloutId, ...]:
        """For an operator, while no learner lives: issue rollouts whose results are lost (and why) again; returns those
        that get a new attempt. Where steps after `checkpoint`, from which the next learner goes on, trained one of
        them, those steps are undone now. Raises LedgerMismatch, LedgerBehind."""
        await self._recall(lambda: self._ledger.recall_groups_of(lost))
        if self._core.epochs.needs_history(checkpoint):
            await self._recall_steps_after(checkpoint)
        if self._core.epochs.trained_after(checkpoint) & set(lost):
            if checkpoint is None and self._core.state.path.checkpoints:
                raise LedgerMismatch(
                    "steps were trained on rollouts that are lost, and no checkpoint of the run is left to go back to: "
                    "put its checkpoints back"
                )
            await self.open_epoch(checkpoint)
            await self._recall(lambda: self._ledger.recall_groups_of(lost))
        return await self._change(lambda: self._core.operators.retry_lost(lost, self._clock()))

    async def record_evaluations(
        self, results: Sequence[tuple[RolloutResult, TaskId]], *, tag: str, version: PolicyVersion
    ) -> tuple[Receipt, ...]:
        """Keep outcomes of evaluation rollouts asked for at `version`; idempotent by (rollout, attempt)."""

        def record_all() -> tuple[Receipt, ...]:
            now = self._clock()
            return tuple(self._core.record_evaluation(result, task, tag, version, now) for result, task in results)

        return await self._change(record_all)

    async def evaluations(self, tag: str) -> tuple[EvaluationRecord, ...]:
        """What was recorded under a tag."""
        return await self._write_alone(lambda: self._ledger.evaluations(tag))

    async def end_evaluation(self, tag: str, step: int, summary: Mapping[str, object]) -> None:
        """Nothing more will be recorded under this tag; idempotent."""
        await self._write_alone(lambda: self._ledger.end_evaluation(tag, step, summary, self._clock()))

    async def ended_evaluations(self) -> dict[str, float | None]:
        """The success of evaluations that have ended, by tag."""
        return await self._write_alone(self._ledger.ended_evaluations)

    def status(self) -> BufferStatus:
        """Counts, from memory."""
        self._check()
        return self._core.status()

    @property
    def head(self) -> PolicyVersion | None:
        """The version that the next step starts from; None before the first epoch."""
        self._check()
        return self._core.state.path.head

    def may_begin(self, version: PolicyVersion) -> bool:
        """Whether attempts may begin with `version` now."""
        self._check()
        return self._core.may_begin(version)

    def lies_ahead(self, version: PolicyVersion) -> bool:
        """Whether the batches issued again lead to the weights of `version`, and are not there yet."""
        self._check()
        return self._core.state.path.lies_ahead(version)

    def admit(self, in_flight: int | None = None) -> int:
        """How many rollouts may start now."""
        self._check()
        return self._core.admit(in_flight)

    def to_cancel(self, version: PolicyVersion) -> tuple[tuple[RolloutId, int], ...]:
        """Attempts that run in vain: those in flight that could not be trained at `version` or later, and those of
        members that their group was sealed without."""
        self._check()
        return self._core.to_cancel(version)

    async def cancellations(
        self, known: Collection[tuple[RolloutId, int]], *, timeout_s: float
    ) -> tuple[tuple[RolloutId, int], ...] | None:
        """Attempts that run in vain at the newest version, as soon as there are others than `known`; None when there
        are not within `timeout_s`."""

        def look() -> tuple[tuple[RolloutId, int], ...] | None:
            self._core.tick(self._clock())
            head = self._core.state.path.head
            vain = () if head is None else self._core.to_cancel(head)
            return None if set(vain) <= set(known) else vain

        return await self._until(look, timeout_s)

    async def export(self, folder: Path) -> None:
        """A copy of the whole ledger, trajectories too, as `verify` reads it. Raises OSError."""
        self._check()
        async with self._writing:
            await self._in_thread(lambda: self._ledger.export(folder))

    def _offer(self, result: RolloutResult, now: float) -> Receipt:
        receipt = self._core.offer(result, now)
        if receipt.status is ReceiptStatus.ACCEPTED and result.trajectory is not None:
            # Of a result that the core took as malformed nothing is stored.
            attempt = self._core.state.attempts[receipt.rollout_id]
            if attempt.trained:
                self._stored.append(
                    StoredTrajectory(
                        rollout_id=attempt.rollout_id, attempt=attempt.attempt, trajectory=result.trajectory
                    )
                )
        return receipt

    async def _until(self, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        """Apply `attempt` now, after each change, and when a group is due, until it gives something or the time is
        over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            changed = self._changed
            result = await self._change(attempt)
            if result is not None:
                return result
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + self._due_in_s())):
                    await changed.wait()
            except TimeoutError:
                if loop.time() >= deadline:
                    return None

    def _due_in_s(self) -> float:
        now = self._clock()
        times = [at for at in (self._core.due_at(), self._core.wakes_at(now)) if at is not None]
        return max(SHORTEST_WAIT_S, min(times) - now) if times else math.inf

    async def _change(self, change: Callable[[], T]) -> T:
        result = self._apply(change)
        await self._flush()
        return result

    def _apply(self, change: Callable[[], T]) -> T:
        """Run a change of the core. If it ends neither well nor in a typed error, the store ends."""
        self._check()
        try:
            result = change()
        except ReplayError:
            raise
        except BaseException as error:
            self._end(f"a change of the core broke off half-way ({type(error).__name__}: {error})")
            if not isinstance(error, Exception):
                raise
            raise LedgerBroken(f"{self._broken}; restart the buffer") from error
        self._applied += 1
        return result

    async def _flush(self) -> None:
        """Return when everything applied so far is durable. Whoever comes first writes for all who wait."""
        wanted = self._applied
        async with self._writing:
            self._check()
            if self._durable >= wanted:
                return
            applied, changes, stored = self._applied, self._core.drain(), self._stored
            self._stored = []
            if changes:
                try:
                    with self._ending_on_failure():
                        await self._in_thread(lambda: self._ledger.write(changes, stored))
                finally:
                    # Written also when the caller was cancelled: others wait for it.
                    self._signal()
            self._durable = applied

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """The core was drained, or the ledger cannot be read: whatever the reason, the store ends."""
        try:
            yield
        except LedgerBroken as error:
            self._end(str(error))
            raise
        except Exception as error:
            self._end(f"the ledger failed: {type(error).__name__}: {error}")
            raise LedgerBroken(f"{self._broken}; see to the disk, then restart the buffer") from error

    async def _in_thread(self, work: Callable[[], T], executor: ThreadPoolExecutor | None = None) -> T:
        """Run to the end even when the caller is cancelled: a transaction is never left in doubt."""
        if self._executor is None:
            return work()

        def run() -> T | Exception:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - a future takes no StopIteration: it would never be done
                return error

        future = asyncio.get_running_loop().run_in_executor(executor or self._executor, run)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        result = future.result()
        if isinstance(result, Exception):
            raise result
        if cancelled is not None:
            raise cancelled
        return result

    async def _batch(self, record: BatchRecord) -> Batch:
        keys = [(member.rollout_id, member.attempt) for member in record.members]
        rollouts = [self._core.state.rollouts[rollout_id] for rollout_id, _ in keys]
        with self._ending_on_failure():
            trajectories = await self._in_thread(lambda: self._ledger.trajectories(keys))
        items = tuple(
            BatchItem(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                attempt=member.attempt,
                reward=rollout.reward or 0.0,
                advantage=rollout.advantage or 0.0,
                staleness=member.staleness,
                trajectory=trajectory,
            )
            for member, rollout, trajectory in zip(record.members, rollouts, trajectories, strict=True)
        )
        return Batch(
            lease=BatchLease(batch_id=record.batch_id, epoch=record.epoch), version=record.version, items=items
        )

    async def refuse_lost_history(self, checkpoint: CheckpointRef | None) -> None:
        """Raises LedgerMismatch when a return to `checkpoint` undoes what was lost with the archive."""
        chain = checkpoint.chain if checkpoint else ""
        if await self._write_alone(lambda: self._ledger.archive_lacks(chain)):
            wanted = checkpoint.path if checkpoint else "the start"
            raise LedgerMismatch(
                f"a return to {wanted} undoes steps that are in archive.db, which is missing or was begun anew: put it "
                "back, e.g. from a copy of the run, or resume from the newest checkpoint"
            )

    async def _recall_steps_after(self, checkpoint: CheckpointRef | None) -> None:
        """Raises LedgerMismatch when the archive was lost."""
        await self.refuse_lost_history(checkpoint)
        await self._recall(lambda: self._ledger.recall(checkpoint.chain if checkpoint else ""))

    async def _recall(self, recall: Callable[[], None]) -> None:
        """Fold the core again with what this brings back from the archive. It blocks: nothing may change meanwhile."""
        async with self._writing:
            self._check()
            changes, stored, self._stored = self._core.drain(), self._stored, []

            def write_and_load() -> Snapshot:
                self._ledger.write(changes, stored)
                recall()
                return self._ledger.load()

            with self._ending_on_failure():
                executor = self._executor
                snapshot = executor.submit(write_and_load).result() if executor else write_and_load()
            self._core.fold(snapshot)

    def _check(self) -> None:
        if self._broken is not None:
            raise LedgerBroken(f"the store has ended: {self._broken}")

    def _end(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._signal()

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
