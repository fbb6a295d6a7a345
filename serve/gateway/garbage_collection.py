"""Garbage collection of a process that serves thousands of sessions: in small portions, and the whole at set times.

Invariants:
- A collection that the interpreter starts by itself looks at `YOUNG_OBJECTS * (YOUNG_ROUNDS + 2)` objects at most; the
  live sessions, millions of objects, are not walked in the middle of a burst of requests. An object costs some
  microseconds then, because everything it refers to has left the processor's caches.
- The whole is collected every `FULL_EVERY_S`, and what was there when the process began to serve never: cycles among
  old objects are few, and none lives longer than that.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

YOUNG_OBJECTS: Final = 1_500
YOUNG_ROUNDS: Final = 0
"""Collections of the youngest after which the next looks at what survived them too."""
FULL_EVERY_S: Final = 600.0
_NEVER: Final = 2**31 - 1


@asynccontextmanager
async def portioned_collections(*, full_every_s: float = FULL_EVERY_S) -> AsyncIterator[None]:
    """For processes that do nothing else: it holds for all of the process while the block lasts."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, _NEVER)
    collecting = asyncio.create_task(_collect_all(full_every_s))
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*usual)
        gc.unfreeze()


async def _collect_all(every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        gc.collect()
