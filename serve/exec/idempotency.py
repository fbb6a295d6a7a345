"""Requests that come again because an answer was lost: their work is done once.

Invariants:
- A request that comes while the same one goes on joins it.
- A result that nobody was left to take is kept for the next such request, once. The latest `KEPT` are.
- A result under a name that the client chose is kept for every such request, among the latest `KEPT`.
What cannot be known without a name: whether a request that comes after an answer was sent repeats it or is a new one.
It is taken for a new one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headrace.sandboxes.remote.tasks import ServerTasks

KEPT: Final = 64


class Repeats:
    """Works by the digest of their request."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks
        self._works: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()

    async def run(self, digest: str, work: Callable[[], Coroutine[Any, Any, Any]], *, named: bool) -> Any:
        """The result of `work`, begun now or by the same request before. It goes on when its caller leaves."""
        entry = self._works.get(digest)
        if entry is None:
            self._forget_old()
            entry = self._works[digest] = self._tasks.share(work())
        try:
            result = await asyncio.shield(entry)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._forget(digest, entry)
            raise
        if not named:
            self._forget(digest, entry)
        return result

    def _forget(self, digest: str, entry: asyncio.Future[Any]) -> None:
        if self._works.get(digest) is entry:
            del self._works[digest]

    def _forget_old(self) -> None:
        done = [digest for digest, entry in self._works.items() if entry.done()]
        for digest in done[: max(0, len(done) - KEPT + 1)]:
            del self._works[digest]
