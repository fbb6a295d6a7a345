"""Long calls of actors whose process may die or hang.

Invariants:
- A long call of a lost actor is made again when the actor is back; what it repeats is idempotent.
- An actor that answers nothing for `hang_s` is killed: then it is a lost actor like any other.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from headrace.actors.errors import ActorLost
from headrace.actors.retry import until_back

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import NoReturn

    from headrace.actors.runtime import Runtime

R = TypeVar("R")

GUARD_S = 2.0
"""How often an actor is asked whether it is alive."""

logger = logging.getLogger(__name__)


async def keep_running(call: Callable[[], Awaitable[R]], ready: Callable[[], Awaitable[object]]) -> R:
    """Await a long call of an actor; when the actor is lost, wait until `ready` answers and call again."""
    while True:
        try:
            return await call()
        except ActorLost:
            await until_back(ready)


async def guard(runtime: Runtime, name: str, actor: object, hang_s: float) -> NoReturn:
    """Kill an actor whenever it hangs, until cancelled; what its death means is handled where its calls are awaited."""
    process_id: int | None = None
    while True:
        await asyncio.sleep(GUARD_S)
        try:
            async with asyncio.timeout(hang_s):
                process_id, _ = await runtime.stats(actor)
        except ActorLost:
            process_id = None
        except TimeoutError:
            if process_id is not None:
                logger.warning("actor %s (process %d) hangs and is killed", name, process_id)
                await runtime.restart(actor, process_id)
