"""Batcher that combines into one call the requests that arrive within a short window or during the previous call.

Invariants:
- On a busy machine calls take longer, so batches grow exactly when calls are expensive. No request waits longer than
  `TOGETHER_S` for the previous batch.
- Every request gets exactly one answer: its result, its own error, or the error of the call that carried it.
- A cancelled request does not affect the others in its batch. Calls that create something, or whose durations vary
  widely, are made as operations instead (`operations.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from headrace.actors.record.files.logs import leave_rollout

Q = TypeVar("Q")
R = TypeVar("R")

DEFAULT_WINDOW_S = 0.01
"""Requests within 10 ms are sent together."""
TOGETHER_S = 0.1
"""Longest time that a request or result waits to be sent with others: a message of its own would cost more than this
delay."""


class Batcher(Generic[Q, R]):
    """Turns a batch call `call(list of requests) -> list of results or errors, same order` into one await per
    request."""

    def __init__(
        self, call: Callable[[list[Q]], Awaitable[Sequence[R | Exception]]], *, window_s: float = DEFAULT_WINDOW_S
    ) -> None:
        self._call = call
        self._window_s = window_s
        self._pending: list[tuple[Q, asyncio.Future[R]]] = []
        self._tasks = asyncio.TaskGroup()
        self._flushing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def __call__(self, request: Q) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((request, answer))
        if len(self._pending) == 1:
            self._flushing = self._tasks.create_task(self._flush(self._flushing))
        return await answer

    async def _flush(self, before: asyncio.Task[None] | None) -> None:
        # The task began in the context of the first caller, but works for all.
        leave_rollout()
        await asyncio.sleep(self._window_s)
        if before is not None:
            await asyncio.wait([before], timeout=TOGETHER_S)
        batch, self._pending = self._pending, []
        live = [(request, answer) for request, answer in batch if not answer.done()]
        if not live:
            return
        try:
            results = await self._call([request for request, _ in live])
        except Exception as error:  # noqa: BLE001 - belongs to every request of the batch
            results = [error] * len(live)
        except asyncio.CancelledError:
            for _, answer in live:
                answer.cancel()
            raise
        for (_, answer), result in zip(live, results, strict=True):
            # It may have been cancelled meanwhile.
            if not answer.done():
                settle(answer, result)


def settle(answer: asyncio.Future[R], result: R | Exception) -> None:
    """Set the result of a future, or its exception."""
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
