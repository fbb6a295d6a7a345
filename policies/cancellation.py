"""Work that has to end in order although whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any


async def outlast(work: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Return when it is done, however often the caller is cancelled meanwhile; the last of these cancellations. The
    work must be of bounded length."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
