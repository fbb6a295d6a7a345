"""The replay buffer with its ledger: the async interface of the core for one run.

Invariants:
- Every call returns after its changes are durable (see `writer`).
- Strings and numbers are cleaned or refused before the core changes (`classification`, `sanitizer`): one result that
  cannot be stored affects no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from headrace.buffer.core.batches import carried_from
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import BatchRecord, Charge, EvaluationRecord
from headrace.buffer.core.replay import BufferStatus, ReplayBuffer
from headrace.buffer.core.task_sources.shares import Source
from headrace.buffer.errors import LedgerMismatch
from headrace.buffer.ledger.ledger import SOURCES, TRAJECTORY_FILE_BYTES, Ledger, StoredTrajectory
from headrace.buffer.ledger.writer import LedgerWriter
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchItem,
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

logger = logging.getLogger(__name__)


class ReplayStore:
    """Replay buffer of one run, created with `open`; an async context manager. `evaluations` records held-out
    evaluations, `trajectory_files` deletes those no longer needed, and `operators` makes the changes that operators
    order in a stopped run."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer, self._core, self._clock = writer, writer.core, writer.clock
        self._untrainable = 0
        self.evaluations = EvaluationStore(writer)
        self.trajectory_files = TrajectoryFiles(writer)
        self.operators = Operators(writer)

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
        limits: RowLimits | None = None,
        sources: Sequence[Source] = (),
    ) -> Self:
        """Open or create the ledger in `run_dir` (None: in memory) and fold the core from it. `clock` gives seconds
        since the Unix epoch; results over the `limits` of the learner count as failures; `sources` are those of the
        tasks, if the run has several. Raises LedgerRefused, LedgerInUse."""
        stream = TaskStream(tasks, seed=seed)
        identity = {"run_id": run_id, "tasks_sha256": stream.digest()}
        if sources:
            identity[SOURCES] = json.dumps({source.name: source.share for source in sources})
        if run_dir is None:
            ledger = Ledger.in_memory(identity)
            core = ReplayBuffer(config, stream, ledger.load(), limits=limits, sources=sources)
            return cls(LedgerWriter(core, ledger, None, clock))
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
        core = ReplayBuffer(config, stream, snapshot, limits=limits, sources=sources)
        writer = LedgerWriter(core, ledger, executor, clock)
        writer.apply(lambda: writer.core.restart_clocks(clock()))
        return cls(writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for the current transaction and close the files; idempotent. Later calls raise LedgerBroken."""
        await self._writer.aclose()

    async def issue(self, limit: int, version: PolicyVersion, *, timeout_s: float = 0.0) -> tuple[RolloutOrder, ...]:
        """Issue up to `limit` attempts, which are durable when this returns. Waits up to `timeout_s` for at least one.
        `version` is the version that the engines serve; no attempt begins while it is over the bound (`may_begin`)."""
        handed: list[tuple[RolloutId, int]] = []

        def issue() -> tuple[RolloutOrder, ...] | None:
            orders = self._core.issue(limit, version, self._clock())
            handed.extend((order.rollout_id, order.attempt) for order in orders)
            return orders or None

        try:
            return await self._writer.until(issue, timeout_s) or ()
        except asyncio.CancelledError:
            # A cancelled caller never received the orders, so nobody will run them.
            self._writer.apply(lambda: self._core.withdraw(handed, self._clock()))
            raise

    async def offer_many(self, results: Sequence[RolloutResult]) -> tuple[Receipt, ...]:
        """Take in the results of attempts, which are durable when this returns. Return one receipt for each, in
        order."""

        def offer(result: RolloutResult, now: float) -> Receipt:
            receipt = self._core.offer(result, now)
            if receipt.status is ReceiptStatus.ACCEPTED and result.trajectory is not None:
                attempt = self._core.state.attempts[receipt.rollout_id]
                if attempt.charged_to is Charge.LEARNER:
                    self._untrainable += 1
                    # Not for each of them: every result of a run may be untrainable.
                    if self._untrainable.bit_count() == 1:
                        name = attempt.rollout_id
                        logger.error("%d results refused so far, last %s: %s", self._untrainable, name, attempt.detail)
                # A result that the core classified as malformed has no trained tokens, and is not stored.
                if attempt.trained:
                    self._writer.stored.append(
                        StoredTrajectory(
                            rollout_id=attempt.rollout_id, attempt=attempt.attempt, trajectory=result.trajectory
                        )
                    )
            return receipt

        def offer_all() -> tuple[Receipt, ...]:
            now = self._clock()
            return tuple(offer(result, now) for result in results)

        return await self._writer.change(offer_all)

    async def abandon(self, attempts: Sequence[tuple[RolloutId, int]]) -> int:
        """Record attempts as infrastructure failures because their runner is gone. Return how many were in flight."""
        return await self._writer.change(lambda: self._core.abandon(attempts, self._clock()))

    async def keep_in_flight(self, carried: Collection[tuple[RolloutId, int]]) -> int:
        """Withdraw every attempt in flight that is not in `carried`. Return how many were withdrawn."""
        return await self._writer.change(lambda: self._core.keep_in_flight(carried, self._clock()))

    async def engines(self, *, serving: bool) -> None:
        """Record whether any engine is serving from now on: while none is, no attempt begins. Idempotent."""
        await self._writer.change(lambda: self._core.engines(serving=serving, now=self._clock()))

    async def take(self, version: PolicyVersion, epoch: int, *, timeout_s: float) -> Batch | None:
        """Lease the next batch, to be trained at `version`; waits up to `timeout_s`, then returns None. Repeating the
        call is safe.

        Raises StaleEpoch (also while waiting, when a newer learner opens), VersionMismatch, DataExhausted.
        """
        record = await self._writer.until(lambda: self._core.take(version, epoch, self._clock()), timeout_s)
        if record is None:
            return None
        keys = [(member.rollout_id, member.attempt) for member in record.members]
        rollouts = [self._core.state.rollouts[rollout_id] for rollout_id, _ in keys]
        sources = [self._core.state.source_of(rollout) for rollout in rollouts]
        tree, state = self._core.state.path.tree, self._core.state
        attempts = [state.attempts[rollout_id] for rollout_id, _ in keys]
        sampled = {version for rollout_id, _ in keys for version in state.versions_of(rollout_id)}
        staleness = {each: tree.staleness(record.version, each) for each in sampled}
        trajectories = await self._writer.read(lambda: self._writer.ledger.trajectories(keys))
        items = tuple(
            BatchItem(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                attempt=member.attempt,
                reward=rollout.reward or 0.0,
                advantage=rollout.advantage or 0.0,
                staleness=member.staleness,
                trajectory=trajectory,
                scores=attempt.scores,
                turn_advantages=rollout.turn_advantages or {},
                source=source,
                group_batch=carried_from(state, rollout),
                family=attempt.family,
                invalid=attempt.cause is Cause.INVALID,
            )
            for member, rollout, attempt, source, trajectory in zip(
                record.members, rollouts, attempts, sources, trajectories, strict=True
            )
        )
        return Batch(
            lease=BatchLease(batch_id=record.batch_id, epoch=record.epoch),
            version=record.version,
            items=items,
            staleness=staleness,
        )

    async def commit(self, lease: BatchLease, report: StepReport) -> None:
        """Record the step on a batch; durable when this returns. Raises StaleEpoch, LeaseError, VersionMismatch."""
        await self._writer.change(lambda: self._core.commit(lease, report, self._clock()))

    async def step_failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        """Record why the step on a batch failed. Return why the step is not tried again, or an empty string when it is.
        Raises StaleEpoch, LeaseError."""
        return await self._writer.change(lambda: self._core.batches.step_failed(lease, reason, again=again))

    async def refuse_rows(self, lease: BatchLease, refused: Mapping[RolloutId, str]) -> None:
        """Filter the members of a batch that the learner refused, with its reasons, and free the others. Idempotent.
        Raises StaleEpoch, LeaseError."""
        await self._writer.change(lambda: self._core.batches.refuse_rows(lease, refused))

    async def step_interrupted(self, lease: BatchLease) -> None:
        """Record that the step on a batch ended for a reason that had nothing to do with the batch. Raises StaleEpoch,
        LeaseError."""
        await self._writer.change(lambda: self._core.batches.step_interrupted(lease))

    async def release(self, lease: BatchLease) -> None:
        """Give a batch back before its step began. Raises StaleEpoch, LeaseError."""
        await self._writer.change(lambda: self._core.batches.release(lease))

    async def checkpointed(self, ref: CheckpointRef, *, copied_elsewhere: bool = False) -> None:
        """Record a durable checkpoint directory, then archive the rows that this closes. Unless the caller copies the
        ledger (`copied_elsewhere`), it is copied to that directory, and trajectory files that are no longer needed are
        deleted. Raises StaleEpoch, LedgerMismatch."""
        writer, ledger = self._writer, self._writer.ledger
        await writer.change(lambda: self._core.epochs.checkpointed(ref, self._clock()))
        # A little at a time, so that offers are written in between.
        while await writer.write_alone(ledger.archive_groups):
            pass
        self._core.state.path.forget_steps(*await writer.write_alone(ledger.archive_steps))
        self._core.state.forget_evaluations(await writer.write_alone(ledger.archive_evaluations))
        if copied_elsewhere:
            # The directory may be on a network disk that hangs: the thread of the ledger never touches it.
            return

        def back_up() -> None:
            # A copy beside the checkpoint, for a node whose disk is lost. It may fail: the checkpoint itself is whole.
            folder = Path(ref.path)
            if folder.is_dir():
                try:
                    ledger.backup(folder / "ledger.db")
                except (OSError, sqlite3.Error) as error:
                    logger.warning("the ledger was not copied to %s: %s", folder, error)

        await writer.copy(back_up)
        if not self._core.config.keep_trajectories:
            await writer.write_alone(ledger.drop_covered)

    async def open_epoch(self, checkpoint: CheckpointRef | None, *, from_start: bool = False) -> PolicyVersion:
        """Open a learner incarnation at `checkpoint`; return its first version. Raises LedgerMismatch, LedgerBehind,
        CheckpointLate, CheckpointMissing."""
        return await _open_epoch(self._writer, checkpoint, from_start=from_start)

    def status(self) -> BufferStatus:
        """Return the counts, from memory."""
        self._writer.check()
        return self._core.status()

    @property
    def head(self) -> PolicyVersion | None:
        """Version that the next step starts from; None before the first epoch."""
        self._writer.check()
        return self._core.state.path.head

    def may_begin(self, version: PolicyVersion) -> bool:
        """Return whether attempts may begin with `version` now."""
        self._writer.check()
        return self._core.may_begin(version)

    def lies_ahead(self, version: PolicyVersion) -> bool:
        """Return whether the queued batches lead to the weights of `version` and have not reached them yet."""
        self._writer.check()
        return self._core.state.path.lies_ahead(version)

    def to_cancel(self, version: PolicyVersion) -> tuple[tuple[RolloutId, int], ...]:
        """Return the attempts whose result could not be trained at `version` or later: those issued at a version over
        the bound, and those of members that were unfinished when their group was sealed."""
        self._writer.check()
        return self._core.to_cancel(version)

    async def cancellations(
        self, known: Collection[tuple[RolloutId, int]], *, timeout_s: float
    ) -> tuple[tuple[RolloutId, int], ...] | None:
        """Return the attempts to cancel at the newest version as soon as there are any besides `known`; None when there
        are none within `timeout_s`."""

        def look() -> tuple[tuple[RolloutId, int], ...] | None:
            self._core.tick(self._clock())
            head = self._core.state.path.head
            to_cancel = () if head is None else self._core.to_cancel(head)
            return None if set(to_cancel) <= set(known) else to_cancel

        return await self._writer.until(look, timeout_s)

    async def export(self, folder: Path) -> None:
        """Copy the whole ledger, including the trajectories, to a folder that `verify` can read. Raises OSError."""
        await self._writer.copy_alone(lambda: self._writer.ledger.export(folder))


class EvaluationStore:
    """Outcomes of held-out evaluations; each evaluation has a tag."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def record(
        self, results: Sequence[tuple[RolloutResult, TaskId]], *, tag: str, version: PolicyVersion
    ) -> tuple[Receipt, ...]:
        """Record outcomes of evaluation rollouts requested at `version`; idempotent by (rollout, attempt)."""

        def record_all() -> tuple[Receipt, ...]:
            core, now = self._writer.core, self._writer.clock()
            return tuple(core.record_evaluation(result, task, tag, version, now) for result, task in results)

        return await self._writer.change(record_all)

    async def recorded(self, tag: str) -> tuple[EvaluationRecord, ...]:
        """Return the outcomes recorded under a tag."""
        return await self._writer.write_alone(lambda: self._writer.ledger.evaluations(tag))

    async def end(self, tag: str, step: int, summary: Mapping[str, object]) -> None:
        """End the evaluation with this tag: nothing more will be recorded under it. Idempotent."""
        writer = self._writer
        await writer.write_alone(lambda: writer.ledger.end_evaluation(tag, step, summary, writer.clock()))

    async def ended(self) -> dict[str, float | None]:
        """Return the success rates of evaluations that have ended, by tag."""
        return await self._writer.write_alone(self._writer.ledger.ended_evaluations)


class TrajectoryFiles:
    """Trajectory files of a run whose checkpoints are not beside its ledger."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def drop_covered(self, checkpoints: Collection[str]) -> None:
        """Delete the files that no open group and none of the checkpoint directories `checkpoints` (their names) needs,
        unless the run keeps all trajectories."""
        if not self._writer.core.config.keep_trajectories:
            await self._writer.write_alone(lambda: self._writer.ledger.drop_covered(checkpoints))


class Operators:
    """Changes that operators make to a stopped run."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer, self._core = writer, writer.core

    async def drop_batch(self, batch_id: BatchId | None = None) -> BatchRecord:
        """Drop a batch for good, by default the leased one. Raises LeaseError."""
        return await self._writer.change(lambda: self._core.operators.drop_batch(batch_id, self._writer.clock()))

    async def retry_batches(self) -> None:
        """Reset the tries of all batches."""
        await self._writer.change(self._core.operators.retry_batches)

    async def unpark(self, tasks: Sequence[str] | None) -> tuple[TaskId, ...]:
        """Issue parked tasks again (None: all of them). Raises TaskNotParked."""
        return await self._writer.change(lambda: self._core.operators.unpark(tasks, self._writer.clock()))

    async def refuse_lost_history(self, checkpoint: CheckpointRef | None) -> None:
        """Raise LedgerMismatch when a return to `checkpoint` undoes steps that were lost with the archive."""
        await self._writer.refuse_lost_history(checkpoint)

    async def retry_lost(
        self, lost: Mapping[RolloutId, str], checkpoint: CheckpointRef | None
    ) -> tuple[RolloutId, ...]:
        """Reissue rollouts whose results are lost; the values of `lost` say why. Return those that get a new attempt.
        If steps after `checkpoint`, from which the next learner continues, trained one of them, undo those steps now.
        Raises LedgerMismatch, LedgerBehind."""
        writer = self._writer
        await writer.recall(lambda: writer.ledger.recall_groups_of(lost))
        await writer.recall_steps_after(checkpoint)
        if self._core.epochs.trained_after(checkpoint) & set(lost):
            if checkpoint is None and self._core.state.path.checkpoints:
                raise LedgerMismatch(
                    "steps were trained on rollouts that are lost, and no checkpoint of the run is left to return to: "
                    "put its checkpoints back"
                )
            await _open_epoch(writer, checkpoint)
            await writer.recall(lambda: writer.ledger.recall_groups_of(lost))
        return await writer.change(lambda: self._core.operators.retry_lost(lost, writer.clock()))


async def _open_epoch(
    writer: LedgerWriter, checkpoint: CheckpointRef | None, *, from_start: bool = False
) -> PolicyVersion:
    writer.check()
    if checkpoint is None and not from_start:
        # Refused before anything is recalled for it.
        writer.core.epochs.refuse_without_checkpoint()
    await writer.recall_steps_after(checkpoint)
    return await writer.change(lambda: writer.core.open_epoch(checkpoint, writer.clock(), from_start=from_start))
