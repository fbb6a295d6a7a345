"""Operations of actors: one call begins the work and other calls fetch its results, so that no batch waits for its
slowest member.

Invariants:
- An operation is named by its caller's key: if it is begun twice, it runs once. Each result is returned once; a caller
  that has lost it begins the operation again under the same key.
- Every request of a caller gets exactly one answer: its result, its own error, or the error of a lost actor.
- Results are sent as they become ready, in batches; results that nobody fetches are released.
- An operation works for the attempt that its caller works for (`attempts.ROLLOUT_ATTEMPT`), also in another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, Generic, Protocol, Self, TypeAlias, TypeVar

from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, wait_random_exponential

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.record.files.logs import leave_rollout
from headrace.actors.runtime.actors.batching import DEFAULT_WINDOW_S, TOGETHER_S, settle
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT

Q = TypeVar("Q")
R = TypeVar("R")

FETCH_S: Final = 10.0
"""Longest time that a fetch waits for a first result before it returns nothing."""
KEPT_S: Final = 120.0
"""Longest time that a result is kept for its caller: longer than an actor takes to restart."""

Attempts: TypeAlias = Mapping[str, tuple[str, int]]
"""Rollout id and attempt that operations work for, by key."""
NO_ATTEMPTS: Final[Attempts] = MappingProxyType({})

DEFAULT_ABSENT_S, CLUSTER_ABSENT_S = 120.0, 1800.0
"""Defaults of `cluster.absent_s`: a process that imports torch takes about 15 s to restart with cold caches, and a node
of a cluster may need half an hour to be replaced."""


@dataclass(slots=True)
class Absence:
    """Time that this process waits for a lost actor: `cluster.absent_s`, the same in every process of a run."""

    seconds: float = DEFAULT_ABSENT_S


ABSENCE: Final = Absence()
"""Setting of this process. `RayRuntime` passes it on to every actor that it starts."""


async def until_back(call: Callable[[], Awaitable[R]], *, deadline_s: float | None = None) -> R:
    """Repeat an idempotent call while its actor restarts. Raises ActorGone once the actor has been lost for
    `deadline_s` (None: `cluster.absent_s`), and other errors immediately.

    The time is measured from the loss, not from the call, which may have been running for a long time."""
    # Tenacity costs more than most calls, so it only handles a call that failed.
    try:
        return await call()
    except ActorLost as error:
        first = error
    deadline_s = ABSENCE.seconds if deadline_s is None else deadline_s
    now = asyncio.get_running_loop().time
    lost_s = now()
    policy = AsyncRetrying(
        retry=retry_if_exception_type(ActorLost),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
        stop=lambda _: now() - lost_s >= deadline_s,
    )
    try:
        async for attempt in policy:
            with attempt:
                if attempt.retry_state.attempt_number == 1:
                    raise first
                began_s = now()
                try:
                    return await call()
                except ActorLost:
                    if now() - began_s > deadline_s / 2:
                        lost_s = now()
                    raise
    except RetryError as error:
        lost = error.last_attempt.exception()
        raise ActorGone(f"{lost}; it did not come back within {deadline_s:g} s (cluster.absent_s)") from lost
    raise AssertionError("tenacity ended without a result or an error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[R]):
    """Results that are ready, by key. The keys in `unknown` have no operation here: the caller must begin those
    again."""

    ready: dict[str, R | Exception] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


class Operator(Protocol[Q, R]):
    """Actor that offers operations."""

    async def begin(self, requests: dict[str, Q], attempts: Attempts = NO_ATTEMPTS) -> Results[R]:
        """Begin the operations that are not running yet, and return the results that are ready immediately. `attempts`
        has the keys of those that work for one attempt."""

    async def fetch(self, keys: list[str]) -> Results[R]:
        """Wait for the next results of these operations."""

    async def withdraw(self, keys: list[str]) -> None:
        """Cancel these operations and release their results. Idempotent."""


class Operations(ResourceOwner, Generic[Q, R]):
    """The actor's side of operations. Errors raised by `work` are returned as results; `unclaimed` receives results
    that nobody has fetched."""

    def __init__(self, work: Callable[[Q], Awaitable[R]], *, unclaimed: Callable[[R], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work
        self._unclaimed = unclaimed
        self._running: dict[str, asyncio.Task[R | Exception]] = {}
        self._forgetting: dict[str, asyncio.TimerHandle] = {}

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(self._end_all)
        return self

    def _end_all(self) -> None:
        for timer in self._forgetting.values():
            timer.cancel()
        for task in self._running.values():
            task.cancel()

    async def begin(self, requests: dict[str, Q], attempts: Attempts = NO_ATTEMPTS) -> Results[R]:
        for key, request in requests.items():
            if key not in self._running:
                task = self._running[key] = self._tasks.create_task(self._run(request, attempts.get(key)))
                task.add_done_callback(partial(self._keep, key))
        await asyncio.wait([self._running[key] for key in requests], timeout=TOGETHER_S)
        return self._take(requests)

    async def _run(self, request: Q, attempt: tuple[str, int] | None = None) -> R | Exception:
        # In the context of this operation's task only.
        ROLLOUT_ATTEMPT.set(attempt)
        try:
            return await self._work(request)
        except Exception as error:  # noqa: BLE001 - belongs to the caller
            return error

    def _keep(self, key: str, task: asyncio.Task[R | Exception]) -> None:
        if self._running.get(key) is task:
            loop = asyncio.get_running_loop()
            self._forgetting[key] = loop.call_later(KEPT_S, self._give_back, key)

    def _give_back(self, key: str) -> None:
        for result in self._take([key]).ready.values():
            if not isinstance(result, Exception):
                self._tasks.create_task(self._drop(result))

    async def _drop(self, result: R) -> None:
        await self._unclaimed(result)

    async def fetch(self, keys: list[str]) -> Results[R]:
        tasks = [self._running[key] for key in keys if key in self._running]
        if tasks and len(tasks) == len(keys) and not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=FETCH_S, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=TOGETHER_S)
        return self._take(keys)

    def _take(self, keys: Iterable[str]) -> Results[R]:
        ready: dict[str, R | Exception] = {}
        unknown: list[str] = []
        for key in keys:
            task = self._running.get(key)
            if task is None:
                unknown.append(key)
            elif task.done():
                del self._running[key]
                if timer := self._forgetting.pop(key, None):
                    timer.cancel()
                if not task.cancelled():
                    ready[key] = task.result()
        return Results(ready=ready, unknown=tuple(unknown))

    async def withdraw(self, keys: list[str]) -> None:
        for key in keys:
            if (task := self._running.get(key)) is not None and not task.done():
                del self._running[key]
                task.cancel()
            else:
                self._give_back(key)


class OperationCalls(Generic[Q, R]):
    """The caller's side of operations: turns begin and fetch into one await per request, and batches requests. A
    cancelled request is withdrawn from the actor; a result that still arrives goes to `unclaimed`."""

    def __init__(
        self, actor: Operator[Q, R], *, unclaimed: Callable[[R], Awaitable[None]], window_s: float = DEFAULT_WINDOW_S
    ) -> None:
        self._actor = actor
        self._unclaimed = unclaimed
        self._window_s = window_s
        self._pending: dict[str, tuple[Q, asyncio.Future[R]]] = {}
        self._attempts: dict[str, tuple[str, int]] = {}
        """Attempts that the pending and the running operations work for."""
        self._tasks = asyncio.TaskGroup()
        self._batches: set[asyncio.Task[None]] = set()
        self._beginning: asyncio.Future[None] | None = None
        """Set once the newest batch has begun."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        for batch in self._batches:
            batch.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def __call__(self, key: str, request: Q) -> R:
        """Return the result of the operation. Raises the operation's error, or ActorGone."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending[key] = (request, answer)
        if (attempt := ROLLOUT_ATTEMPT.get()) is not None:
            self._attempts[key] = attempt
        if len(self._pending) == 1:
            before, self._beginning = self._beginning, asyncio.get_running_loop().create_future()
            batch = self._tasks.create_task(self._carry(before, self._beginning))
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                # The answer arrived in the same turn of the loop, and the actor no longer has it.
                if answer.exception() is None:
                    self._tasks.create_task(_unless_gone(self._unclaimed(answer.result())))
            elif self._pending.pop(key, None) is None:
                self._tasks.create_task(_unless_gone(until_back(lambda: self._actor.withdraw([key]))))
            raise
        finally:
            self._attempts.pop(key, None)

    async def _carry(self, before: asyncio.Future[None] | None, begun: asyncio.Future[None]) -> None:
        """Process one batch, from its first request until the last has its answer."""
        # The task began in the context of the first caller, but works for all.
        leave_rollout()
        await asyncio.sleep(self._window_s)
        if before is not None:
            await asyncio.wait([before], timeout=TOGETHER_S)
        batch, self._pending = self._pending, {}
        waiting = {key: answer for key, (_, answer) in batch.items()}
        to_begin = list(batch)
        try:
            while waiting := {key: answer for key, answer in waiting.items() if not answer.done()}:
                requests = {key: batch[key][0] for key in to_begin if key in waiting}
                attempts = {key: self._attempts[key] for key in requests if key in self._attempts}
                try:
                    begin = partial(self._actor.begin, requests, attempts)
                    results = await (until_back(begin) if requests else self._actor.fetch(list(waiting)))
                    to_begin = list(results.unknown)
                except ActorLost:
                    # All operations are lost with the actor.
                    results, to_begin = Results(), list(waiting)
                if not begun.done():
                    begun.set_result(None)
                for key, result in results.ready.items():
                    _, answer = batch[key]
                    if not answer.done():
                        settle(answer, result)
                    elif not isinstance(result, Exception):
                        await self._unclaimed(result)
        except Exception as error:  # noqa: BLE001 - belongs to every request that is left
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(error)
        except asyncio.CancelledError:
            for answer in waiting.values():
                answer.cancel()
            raise
        finally:
            begun.cancel()


async def _unless_gone(call: Awaitable[None]) -> None:
    with suppress(ActorGone):
        await call
