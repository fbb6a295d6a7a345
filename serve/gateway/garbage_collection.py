"""The garbage collection of a process with thousands of sessions: small collections, and a full one at intervals.

Invariants:
- A collection that the interpreter triggers visits at most `YOUNG_OBJECTS * (YOUNG_ROUNDS + 2)` objects; the live
  sessions, millions of objects, are not traversed during a burst of requests. An object costs some microseconds then,
  because everything it refers to has left the processor's caches.
- A full collection runs every `FULL_EVERY_S`. Objects that existed before the process began to serve are never
  collected. Cycles among old objects are few, and none lives longer than that interval.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

YOUNG_OBJECTS: Final = 1_500
YOUNG_ROUNDS: Final = 0
"""Number of youngest-generation collections before one that includes the next generation."""
FULL_EVERY_S: Final = 600.0
_NEVER: Final = 2**31 - 1


@asynccontextmanager
async def portioned_collections(*, full_every_s: float = FULL_EVERY_S) -> AsyncIterator[None]:
    """Apply the settings during the block. They affect the whole process, so it must do nothing else."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, _NEVER)

    async def collect_all() -> None:
        while True:
            await asyncio.sleep(full_every_s)
            gc.collect()

    collecting = asyncio.create_task(collect_all())
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*usual)
        gc.unfreeze()
