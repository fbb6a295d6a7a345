"""One call for all requests that are ready within a short window, or while the call before is under way.

Invariants:
- A busy machine answers late, so that more travels together just when each call costs others time; but no request waits
  longer than `TOGETHER_S` for those before it.
- Every request gets exactly one answer: its result, its own error, or the error of the call that carried it.
- A cancelled request does not disturb the others of its batch. Calls that make something, or of which one may be far
  slower than another, are operations (`operations.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

Q = TypeVar("Q")
R = TypeVar("R")

DEFAULT_WINDOW_S = 0.01
"""All rollouts ready within 10 ms travel together."""
TOGETHER_S = 0.1
"""How long something waits for more to travel with it: a message costs more than this delay does."""


class Batcher(Generic[Q, R]):
    """Turns `call(list of requests) -> list of results or errors, same order` into one-by-one awaits."""

    def __init__(
        self,
        call: Callable[[list[Q]], Awaitable[Sequence[R | Exception]]],
        *,
        window_s: float = DEFAULT_WINDOW_S,
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
            _settle(live, [error] * len(live))
        except asyncio.CancelledError:
            for _, answer in live:
                answer.cancel()
            raise
        else:
            _settle(live, results)


def _settle(live: list[tuple[Q, asyncio.Future[R]]], results: Sequence[R | Exception]) -> None:
    """Answer every request that was not cancelled meanwhile."""
    for (_, answer), result in zip(live, results, strict=True):
        if answer.done():
            continue
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
