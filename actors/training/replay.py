"""The replay buffer actor: a `ReplayStore` in the run's directory, or in memory.

Invariants:
- A broken store ends this process, so that Ray starts a new one that rebuilds its state from disk.
- Only one dispatcher gets orders: the one that reconciled last.
- Orders begin with the version that the engines are serving. While that version exceeds the staleness bound, as after a
  fork, no orders are issued until the engines serve another version.
- A run whose data set is used up ends normally; a run whose tasks are all parked ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from headrace.actors.errors import TasksParked
from headrace.actors.record.files.metrics import UNRECORDED, MetricsLog, RecordsMetrics, RolloutPhasesMetric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.ledger_copies import LedgerCopies
from headrace.actors.runtime.actors.runtime import end_actor
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.replay import BufferStatus
from headrace.buffer.core.source_names import source_name
from headrace.buffer.core.task_sources.shares import Source
from headrace.buffer.errors import LedgerBroken, StaleEpoch
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.tasks.task import Task, TaskId, load_tasks
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.types import (
    Batch,
    BatchLease,
    Cause,
    CheckpointRef,
    GroupId,
    Receipt,
    ReceiptStatus,
    RolloutId,
    RolloutOrder,
    RolloutResult,
    StepReport,
)
from headrace.buffer.trajectories.versions import PolicyVersion

logger = logging.getLogger(__name__)

IN_MEMORY = "in memory"
"""Run id of a ledger without a directory."""


def parked_line(parked: Mapping[TaskId, str]) -> str:
    """Return a line with the number of parked tasks, the task parked last and its failure; empty if none is parked."""
    if not parked:
        return ""
    task, failure = list(parked.items())[-1]
    return f"{len(parked)} {'task is' if len(parked) == 1 else 'tasks are'} parked, last {task}: {failure}"


def refuse_all_parked(parked: Mapping[TaskId, str], *, tasks: int, step: int, source: str = "") -> None:
    """Raise TasksParked if a run that gets no further batch after `step` optimizer updates has all its tasks parked, or
    all those of `source`."""
    if source:
        parked = {task: failure for task, failure in parked.items() if source_name(task) == source}
    if len(parked) == tasks:
        of_source = f" of source {source}" if source else ""
        raise TasksParked(
            f"no task{of_source} is left to train on after {step} steps: {parked_line(parked)}; `headrace report` "
            "shows why each failed: fix the causes, release the tasks with `headrace ledger unpark RUN --all`, and "
            "resume; or start a new run with a larger buffer.max_attempts or buffer.park_after"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Attempts to start, and attempts to cancel because they exceed the staleness bound or were left out when their
    group was sealed."""

    orders: tuple[RolloutOrder, ...]
    to_cancel: tuple[tuple[RolloutId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Recorded result of one evaluation rollout: the number of its last attempt, its reward if it has one, and whether
    that attempt solved the task."""

    attempts: int
    reward: float | None
    solved: bool = False

    def after(self, attempt: int, reward: float | None, *, solved: bool) -> Evaluated:
        """Return the result after one more attempt. The first reward counts."""
        if self.reward is not None:
            reward, solved = self.reward, self.solved
        return Evaluated(attempts=max(self.attempts, attempt), reward=reward, solved=solved)


NEVER_EVALUATED = Evaluated(attempts=0, reward=None)


class Replay(RecordsMetrics):
    """Sole owner of the run's ledger, and of its `metrics`. Without a directory, the ledger is in memory and covers
    `tasks`; `clock` returns Unix seconds. Results that exceed the `limits` of the learner count as its failures. With
    each checkpoint the ledger is copied to the storage folder `copies`; None if the directory itself is the run's
    storage. `sources` are those of the tasks, if the run has several."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        directory: RunDirectory | None,
        seed: int,
        tasks: Sequence[Task] = (),
        clock: Callable[[], float] = time.time,
        limits: RowLimits | None = None,
        metrics: MetricsLog = UNRECORDED,
        copies: Path | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        super().__init__(metrics)
        self._config, self._sources = config, sources
        self._copies_to = copies
        self._copies: LedgerCopies | None = None
        self._limits = limits
        self._directory = directory
        self._seed = seed
        self._tasks = tasks
        self._clock = clock
        self._stack = AsyncExitStack()
        self._opened = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        directory = self._directory
        store = ReplayStore.open(
            None if directory is None else directory.path,
            self._config,
            self._tasks if directory is None else load_tasks(directory.train_tasks),
            run_id=IN_MEMORY if directory is None else directory.run_id(),
            seed=self._seed,
            clock=self._clock,
            limits=self._limits,
            sources=self._sources,
        )
        self._store = await self._stack.enter_async_context(await store)
        if directory is not None and self._copies_to is not None:
            copies = LedgerCopies(self._store, directory.path, self._copies_to, self._clock)
            self._copies = await self._stack.enter_async_context(copies)
        self._orders = _Orders(self._store)
        if self._store.head is not None:
            self._opened.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await self._stack.aclose()

    async def issue(self, limit: int, dispatcher: str, *, timeout_s: float) -> Issued:
        """Issue up to `limit` attempts durably; wait up to `timeout_s` for the first. Nothing is issued before a
        learner has opened an epoch, or to a dispatcher that another one has replaced."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
            if self._orders.dispatcher in ("", dispatcher):
                with self._ending():
                    orders = await self._orders.issue(limit, timeout_s)
                    return Issued(orders=orders, to_cancel=self._store.to_cancel(_head(self._store)))
        except TimeoutError:
            pass
        return Issued(orders=(), to_cancel=())

    async def cancellations(
        self, known: list[tuple[RolloutId, int]], *, timeout_s: float
    ) -> tuple[tuple[RolloutId, int], ...] | None:
        """Return the attempts to cancel, as soon as there are any that are not in `known`; None if there are none
        within `timeout_s`."""
        with self._ending():
            return await self._store.cancellations(known, timeout_s=timeout_s)

    async def offer(self, results: list[RolloutResult]) -> tuple[Receipt, ...]:
        """Store results durably, each once, and record how long their phases took."""
        with self._ending():
            receipts = await self._store.offer_many(results)
        known = {(receipt.rollout_id, receipt.attempt) for receipt in receipts if receipt.status in _KNOWN}
        if ran := [
            result
            for result in results
            if result.outcome.cause is not Cause.CANCELLED and (result.rollout_id, result.attempt) not in known
        ]:
            self._metrics.append(mean_phases(ran))
        return receipts

    async def abandon(self, attempts: list[tuple[RolloutId, int]]) -> int:
        with self._ending():
            return await self._store.abandon(attempts)

    async def reconcile(self, carried: list[tuple[RolloutId, int]], dispatcher: str) -> int:
        """Withdraw every attempt in flight that is not in `carried`, and return their number. From now on orders go
        only to this dispatcher: nobody would run the orders that an earlier dispatcher is still waiting for."""
        if dispatcher != self._orders.dispatcher:
            self._orders.interrupt()
        self._orders.dispatcher = dispatcher
        with self._ending():
            return await self._store.keep_in_flight(carried)

    async def engines(self, *, serving: bool) -> None:
        """Record whether any engine is serving from now on. While none is, no orders are issued and no failure is
        charged to a task."""
        with self._ending():
            await self._store.engines(serving=serving)

    async def take(self, version: PolicyVersion, *, timeout_s: float) -> Batch | None:
        with self._ending():
            return await self._store.take(version, version.epoch, timeout_s=timeout_s)

    async def commit(self, lease: BatchLease, report: StepReport) -> None:
        with self._ending():
            await self._store.commit(lease, report)

    async def step_failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        with self._ending():
            return await self._store.step_failed(lease, reason, again=again)

    async def give_back(self, lease: BatchLease, refused: Mapping[RolloutId, str]) -> None:
        """Take back a batch that was not trained. If the learner refused rows of members (with its reasons), these are
        filtered and the others free, otherwise the same batch comes again."""
        with self._ending():
            if refused:
                await self._store.refuse_rows(lease, refused)
            else:
                await self._store.release(lease)

    async def step_interrupted(self, lease: BatchLease) -> None:
        with self._ending():
            await self._store.step_interrupted(lease)

    async def checkpointed(self, checkpoint: CheckpointRef) -> None:
        with self._ending():
            await self._store.checkpointed(checkpoint, copied_elsewhere=self._copies is not None)
        if self._copies is not None:
            self._copies.request(checkpoint)

    async def open_epoch(self, checkpoint: CheckpointRef | None) -> PolicyVersion:
        with self._ending():
            version = await self._store.open_epoch(checkpoint)
        self._opened.set()
        return version

    async def lies_ahead(self, version: PolicyVersion) -> bool:
        """Return True if a resumed learner will reach the weights of `version` by repeating steps: engines that serve
        them need no push, and the tokens that they sample will not be stale when they are trained on."""
        with self._ending():
            return self._store.lies_ahead(version)

    async def served(self, version: PolicyVersion, *, epoch: int) -> None:
        """Record that the engines are now serving this version: attempts issued from now on begin with it. `epoch` is
        that of the learner that reports it. Raises StaleEpoch when a newer one has been opened."""
        with self._ending():
            current = _head(self._store).epoch
            if epoch != current:
                raise StaleEpoch(f"epoch {epoch} is not the current one ({current}): this learner must end")
            self._orders.serve(version, always_interrupt=self._config.mode != "async")

    async def record_evaluations(self, ended: Sequence[tuple[RolloutOrder, RolloutResult]]) -> None:
        """Record outcomes of evaluation rollouts; the group of each order is the evaluation's tag."""
        by_tag: dict[GroupId, list[tuple[RolloutResult, TaskId]]] = {}
        for order, result in ended:
            by_tag.setdefault(order.group_id, []).append((result, order.task_id))
        with self._ending():
            for tag, results in by_tag.items():
                await self._store.evaluations.record(results, tag=tag, version=_head(self._store))

    async def evaluated(self, tag: GroupId) -> dict[RolloutId, Evaluated]:
        """Return the recorded results of an evaluation, by rollout."""
        known: dict[RolloutId, Evaluated] = {}
        with self._ending():
            for record in await self._store.evaluations.recorded(tag):
                before = known.get(record.rollout_id, NEVER_EVALUATED)
                known[record.rollout_id] = before.after(record.attempt, record.reward, solved=record.solved)
        return known

    async def end_evaluation(self, tag: GroupId, step: int, summary: dict[str, Any]) -> None:
        """End the evaluation with this tag: nothing more will be recorded under it. Idempotent."""
        with self._ending():
            await self._store.evaluations.end(tag, step, summary)

    async def ended_evaluations(self) -> dict[str, float | None]:
        """Return the success rates of evaluations that have ended, by tag."""
        with self._ending():
            return await self._store.evaluations.ended()

    async def export(self, folder: Path) -> None:
        """Copy the ledger, including its trajectories, into a folder that `ledger verify` can read. Raises OSError."""
        with self._ending():
            await self._store.export(folder)

    async def status(self) -> BufferStatus:
        with self._ending():
            status = self._store.status()
        return status if self._copies is None else replace(status, ledger_copy=self._copies.outcome)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except LedgerBroken:
            if self._closing:
                raise
            logger.exception("the ledger is broken; this process ends, and a new one starts from the disk")
            end_actor()


_KNOWN = (ReceiptStatus.DUPLICATE, ReceiptStatus.UNKNOWN)


def mean_phases(results: Sequence[RolloutResult]) -> RolloutPhasesMetric:
    """Return the mean seconds per phase over the rollouts, and the number of rollouts."""
    totals: dict[str, float] = {}
    for result in results:
        for phase, seconds in result.phases_s:
            totals[phase] = totals.get(phase, 0.0) + seconds / len(results)
    return RolloutPhasesMetric(rollouts=float(len(results)), phases_s=totals)


class _Orders:
    """Orders for one dispatcher at a time, with the version that the engines are serving."""

    def __init__(self, store: ReplayStore) -> None:
        self._store = store
        self.dispatcher = ""
        self._waiting: asyncio.Timeout | None = None
        self._served: PolicyVersion | None = None
        self._requested: PolicyVersion | None = None

    async def issue(self, limit: int, timeout_s: float) -> tuple[RolloutOrder, ...]:
        """Raise TimeoutError on `interrupt`; nothing is issued then."""
        async with asyncio.timeout(None) as waiting:
            # As long as this process has no report from the engines: the ledger's newest version.
            self._waiting, self._requested = waiting, self._served or _head(self._store)
            try:
                return await self._store.issue(limit, self._requested, timeout_s=timeout_s)
            finally:
                # A timeout that has ended can no longer be rescheduled.
                self._waiting = None if self._waiting is waiting else self._waiting

    def serve(self, version: PolicyVersion, *, always_interrupt: bool) -> None:
        """Use this version from now on. A waiting call is interrupted if its own version is over the bound."""
        self._served = version
        over = self._requested is not None and not self._store.may_begin(self._requested)
        if over or always_interrupt:
            self.interrupt()

    def interrupt(self) -> None:
        """Make a waiting call return without orders; its dispatcher asks again."""
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0.0)


def _head(store: ReplayStore) -> PolicyVersion:
    return store.head or PolicyVersion(1, 0)
