"""Waits for work that must finish even if its caller is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any


async def outlast(work: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Wait until `work` is done, even if the caller is cancelled in the meantime, and return the last cancellation
    (None if there was none). `work` must be bounded in time."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
