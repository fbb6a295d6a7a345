"""The replay buffer actor: `headrace.buffer.ledger.store.ReplayStore` under the run's directory, or in memory.

Invariant: whatever the store broke on ends this process, so that Ray starts a new one that folds itself from the disk
again. One dispatcher is given orders at a time: the one that reconciled last. Orders begin with the version that the
engines serve; while that is over the bound, as after a fork, they wait until the engines serve another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.actors.runtime.runtime import end_actor
from headrace.buffer.errors import LedgerBroken
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.tasks import load_tasks
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.buffer.core.config import BufferConfig
    from headrace.buffer.core.replay import BufferStatus
    from headrace.buffer.tasks import Task, TaskId
    from headrace.buffer.types import (
        Batch,
        BatchLease,
        CheckpointRef,
        GroupId,
        Receipt,
        RolloutId,
        RolloutOrder,
        RolloutResult,
        StepReport,
    )

logger = logging.getLogger(__name__)

IN_MEMORY = "in memory"
"""What a ledger without a directory knows its run by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """What may start, and what runs in vain: over the staleness bound, or left out when its group was sealed."""

    orders: tuple[RolloutOrder, ...]
    to_cancel: tuple[tuple[RolloutId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the ledger holds of one evaluation rollout: the number of its last attempt, and its reward if it has one,
    with whether that attempt solved the task."""

    attempts: int
    reward: float | None
    solved: bool = False

    def after(self, attempt: int, reward: float | None, *, solved: bool) -> Evaluated:
        """With one more attempt. The first reward stands."""
        if self.reward is not None:
            reward, solved = self.reward, self.solved
        return Evaluated(attempts=max(self.attempts, attempt), reward=reward, solved=solved)


NEVER_EVALUATED = Evaluated(attempts=0, reward=None)


class Replay:
    """The one owner of the run's ledger. Without a directory it is in memory, over `tasks`; `clock` gives Unix
    seconds."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        directory: RunDirectory | None,
        seed: int,
        tasks: Sequence[Task] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._directory = directory
        self._seed = seed
        self._tasks = tasks
        self._clock = clock
        self._stack = AsyncExitStack()
        self._opened = asyncio.Event()
        self._dispatcher = ""
        self._issuing: asyncio.Timeout | None = None
        self._closing = False
        self._served: PolicyVersion | None = None
        self._asked: PolicyVersion | None = None

    async def __aenter__(self) -> Self:
        directory = self._directory
        store = ReplayStore.open(
            None if directory is None else directory.path,
            self._config,
            self._tasks if directory is None else load_tasks(directory.train_tasks),
            run_id=IN_MEMORY if directory is None else directory.run_id(),
            seed=self._seed,
            clock=self._clock,
        )
        self._store = await self._stack.enter_async_context(await store)
        if self._store.head is not None:
            self._opened.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        await self._stack.aclose()

    async def issue(self, limit: int, dispatcher: str, *, timeout_s: float) -> Issued:
        """Up to `limit` attempts to run, durable; waits up to `timeout_s` for the first. None before a learner
        opened, and none for a dispatcher that another one has followed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
            if self._dispatcher in ("", dispatcher):
                return await self._issue(limit, timeout_s)
        except TimeoutError:
            pass
        return Issued(orders=(), to_cancel=())

    async def _issue(self, limit: int, timeout_s: float) -> Issued:
        """Raises TimeoutError when another dispatcher takes over meanwhile, or another version is served; nothing is
        handed out then."""
        with self._ending():
            async with asyncio.timeout(None) as issuing:
                self._issuing, self._asked = issuing, self._serving()
                try:
                    orders = await self._store.issue(limit, self._asked, timeout_s=timeout_s)
                finally:
                    # A timeout that is over cannot be moved any more.
                    self._issuing = None if self._issuing is issuing else self._issuing
            return Issued(orders=orders, to_cancel=self._store.to_cancel(self._head()))

    async def cancellations(
        self, known: list[tuple[RolloutId, int]], *, timeout_s: float
    ) -> tuple[tuple[RolloutId, int], ...] | None:
        """Attempts that run in vain, as soon as there are others than `known`; None when there are not within
        `timeout_s`."""
        with self._ending():
            return await self._store.cancellations(known, timeout_s=timeout_s)

    async def offer(self, results: list[RolloutResult]) -> tuple[Receipt, ...]:
        with self._ending():
            return await self._store.offer_many(results)

    async def abandon(self, attempts: list[tuple[RolloutId, int]]) -> int:
        with self._ending():
            return await self._store.abandon(attempts)

    async def reconcile(self, carried: list[tuple[RolloutId, int]], dispatcher: str) -> int:
        """Abandon every attempt in flight that nobody carries; returns how many. From here on orders go to this
        dispatcher alone: what one before it still waits for would be carried by nobody."""
        if dispatcher != self._dispatcher:
            self._stop_issuing()
        self._dispatcher = dispatcher
        with self._ending():
            return await self._store.keep_in_flight(carried)

    async def engines(self, *, serving: bool) -> None:
        """Whether an engine serves from now on; while none does, nothing is issued and no task is charged."""
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

    async def step_interrupted(self, lease: BatchLease) -> None:
        with self._ending():
            await self._store.step_interrupted(lease)

    async def checkpointed(self, checkpoint: CheckpointRef) -> None:
        with self._ending():
            await self._store.checkpointed(checkpoint)

    async def open_epoch(self, checkpoint: CheckpointRef | None) -> PolicyVersion:
        with self._ending():
            version = await self._store.open_epoch(checkpoint)
        self._opened.set()
        return version

    async def lies_ahead(self, version: PolicyVersion) -> bool:
        """Whether a resumed learner is on its way back to the weights of `version`: engines that serve them stay as
        they are, and what they sample is not stale when it is trained."""
        with self._ending():
            return self._store.lies_ahead(version)

    async def served(self, version: PolicyVersion) -> None:
        """The engines serve this version now: what is issued from here on begins with it."""
        self._served = version
        with self._ending():
            in_vain = self._asked is not None and not self._store.may_begin(self._asked)
        if in_vain or self._config.mode != "async":
            # What waits asked for another version.
            self._stop_issuing()

    async def record_evaluations(self, ended: Sequence[tuple[RolloutOrder, RolloutResult]]) -> None:
        """Keep outcomes of evaluation rollouts; the tag is the order's group."""
        by_tag: dict[GroupId, list[tuple[RolloutResult, TaskId]]] = {}
        for order, result in ended:
            by_tag.setdefault(order.group_id, []).append((result, order.task_id))
        with self._ending():
            for tag, results in by_tag.items():
                await self._store.record_evaluations(results, tag=tag, version=self._head())

    async def evaluated(self, tag: GroupId) -> dict[RolloutId, Evaluated]:
        """What is known of an evaluation's rollouts."""
        known: dict[RolloutId, Evaluated] = {}
        with self._ending():
            for record in await self._store.evaluations(tag):
                before = known.get(record.rollout_id, NEVER_EVALUATED)
                known[record.rollout_id] = before.after(record.attempt, record.reward, solved=record.solved)
        return known

    async def end_evaluation(self, tag: GroupId, step: int, summary: dict[str, Any]) -> None:
        """Nothing more will be recorded under this tag; idempotent."""
        with self._ending():
            await self._store.end_evaluation(tag, step, summary)

    async def ended_evaluations(self) -> dict[str, float | None]:
        """The success of evaluations that have ended, by tag."""
        with self._ending():
            return await self._store.ended_evaluations()

    async def export(self, folder: Path) -> None:
        """Copy the ledger, trajectories too, into a folder that `ledger verify` reads. Raises OSError."""
        with self._ending():
            await self._store.export(folder)

    async def status(self) -> BufferStatus:
        with self._ending():
            return self._store.status()

    def _serving(self) -> PolicyVersion:
        """What the engines serve, as far as this process was told; else the ledger's newest version."""
        return self._served or self._head()

    def _stop_issuing(self) -> None:
        """Whoever waits for orders gets none, and asks again."""
        if self._issuing is not None and not self._issuing.expired():
            self._issuing.reschedule(0.0)

    def _head(self) -> PolicyVersion:
        return self._store.head or PolicyVersion(1, 0)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except LedgerBroken:
            if self._closing:
                raise
            logger.exception("the ledger broke; this process ends and starts again from the disk")
            end_actor()
