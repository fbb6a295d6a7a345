"""The replay buffer actor: `headrace.buffer.store.ReplayStore` under the run's directory.

Invariant: whatever the store broke on ends this process, so that Ray starts a new one that folds itself from the disk
again. One dispatcher is given orders at a time: the one that reconciled last.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from headrace.buffer.errors import LedgerBroken
from headrace.buffer.store import ReplayStore
from headrace.buffer.tasks import load_tasks
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from headrace.actors.run_directory import RunDirectory
    from headrace.buffer.replay import BufferConfig, BufferStatus
    from headrace.buffer.tasks import TaskId
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

SYNC_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """What may start, and what runs although it could not be trained any more."""

    orders: tuple[RolloutOrder, ...]
    over_bound: tuple[tuple[RolloutId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the ledger holds of one evaluation rollout: the number of its last attempt, and its reward if it has one."""

    attempts: int
    reward: float | None


NEVER_EVALUATED = Evaluated(attempts=0, reward=None)


class Replay:
    """The one owner of the run's ledger."""

    def __init__(self, config: BufferConfig, *, directory: RunDirectory, seed: int) -> None:
        self._config = config
        self._directory = directory
        self._seed = seed
        self._stack = AsyncExitStack()
        self._opened = asyncio.Event()
        self._dispatcher = ""
        self._issuing: asyncio.Timeout | None = None
        self._closing = False
        self._served: PolicyVersion | None = None

    async def __aenter__(self) -> Self:
        directory = self._directory
        store = ReplayStore.open(
            directory.path,
            self._config,
            load_tasks(directory.train_tasks),
            run_id=directory.identity.read_text(),
            seed=self._seed,
        )
        self._store = await self._stack.enter_async_context(await store)
        if self._store.status().head is not None:
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
        return Issued(orders=(), over_bound=())

    async def _issue(self, limit: int, timeout_s: float) -> Issued:
        """Raises TimeoutError when another dispatcher takes over meanwhile; nothing is handed out then."""
        with self._ending():
            async with asyncio.timeout(None) as issuing:
                self._issuing = issuing
                try:
                    orders = await self._store.issue(limit, self._serving(), timeout_s=self._patience_s(timeout_s))
                finally:
                    # A timeout that is over cannot be moved any more.
                    self._issuing = None if self._issuing is issuing else self._issuing
            return Issued(orders=orders, over_bound=self._store.over_bound(self._head()))

    async def offer(self, results: list[RolloutResult]) -> tuple[Receipt, ...]:
        with self._ending():
            return await self._store.offer_many(results)

    async def abandon(self, attempts: list[tuple[RolloutId, int]]) -> int:
        with self._ending():
            return await self._store.abandon(attempts)

    async def reconcile(self, carried: list[tuple[RolloutId, int]], dispatcher: str) -> int:
        """Abandon every attempt in flight that nobody carries; returns how many. From here on orders go to this
        dispatcher alone: what one before it still waits for would be carried by nobody."""
        if dispatcher != self._dispatcher and self._issuing is not None and not self._issuing.expired():
            self._issuing.reschedule(0.0)
        self._dispatcher = dispatcher
        with self._ending():
            return await self._store.keep_in_flight(carried)

    async def take(self, version: PolicyVersion, *, timeout_s: float) -> Batch | None:
        with self._ending():
            return await self._store.take(version, version.epoch, timeout_s=timeout_s)

    async def commit(self, lease: BatchLease, report: StepReport) -> None:
        with self._ending():
            await self._store.commit(lease, report)

    async def checkpointed(self, checkpoint: CheckpointRef) -> None:
        with self._ending():
            await self._store.checkpointed(checkpoint)

    async def open_epoch(self, checkpoint: CheckpointRef | None) -> PolicyVersion:
        with self._ending():
            version = await self._store.open_epoch(checkpoint)
        self._opened.set()
        return version

    async def served(self, version: PolicyVersion) -> None:
        """The engines serve this version now: what is issued from here on begins with it."""
        self._served = version

    async def record_evaluations(self, ended: Sequence[tuple[RolloutOrder, RolloutResult]]) -> None:
        """Keep outcomes of evaluation rollouts; the tag is the order's group."""
        by_tag: dict[GroupId, list[tuple[RolloutResult, TaskId]]] = {}
        for order, result in ended:
            by_tag.setdefault(order.group_id, []).append((result, order.task.id))
        with self._ending():
            for tag, results in by_tag.items():
                await self._store.record_evaluations(results, tag=tag, version=self._head())

    async def evaluated(self, tag: GroupId) -> dict[RolloutId, Evaluated]:
        """What is known of an evaluation's rollouts."""
        known: dict[RolloutId, Evaluated] = {}
        with self._ending():
            for record in await self._store.evaluations(tag):
                before = known.get(record.rollout_id, NEVER_EVALUATED)
                known[record.rollout_id] = Evaluated(
                    attempts=max(before.attempts, record.attempt),
                    reward=record.reward if before.reward is None else before.reward,
                )
        return known

    async def status(self) -> BufferStatus:
        with self._ending():
            return self._store.status()

    def _serving(self) -> PolicyVersion:
        """What the engines serve, as far as this process was told; else the ledger's newest version."""
        return self._served or self._head()

    def _patience_s(self, timeout_s: float) -> float:
        """In mode `sync` one wait asks for one version: it ends soon, so that the next one asks for the version pushed
        meanwhile."""
        return min(timeout_s, SYNC_POLL_S) if self._config.mode == "sync" else timeout_s

    def _head(self) -> PolicyVersion:
        return self._store.status().head or PolicyVersion(1, 0)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except LedgerBroken:
            if self._closing:
                raise
            logger.exception("the ledger broke; this process ends and starts again from the disk")
            os._exit(70)
