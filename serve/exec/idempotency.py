"""Deduplication of requests that clients repeat after a lost response.

Invariants:
- A request that arrives while an equal one is running shares its result.
- A result whose client has disconnected is stored for the next equal request, once.
- A result with a client-chosen name is stored for all equal requests.
- At most `MAX_STORED` results are stored; the oldest are dropped.
Without a name, a request that arrives after the response was sent may be a repetition or a new request. It is treated
as a new one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headrace.sandboxes.remote.tasks import ServerTasks

MAX_STORED: Final = 64


class IdempotentRequests:
    """Running and stored work, by the digest of its request."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks
        self._works: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()

    async def run(self, digest: str, work: Callable[[], Coroutine[Any, Any, Any]], *, named: bool) -> Any:
        """Return the result of `work`, started now or by an equal request. It continues when its caller is
        cancelled."""
        entry = self._works.get(digest)
        if entry is None:
            done = [known for known, stored in self._works.items() if stored.done()]
            for known in done[: max(0, len(done) - MAX_STORED + 1)]:
                del self._works[known]
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
