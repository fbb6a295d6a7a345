"""Processes held by their pidfds: their ids may be another's by the time that somebody looks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress


def opened(pids: Iterable[int]) -> list[int]:
    """Pidfds of those that have not ended meanwhile."""
    handles = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


async def all_dead(handles: list[int]) -> None:
    """Wait for their end."""
    loop = asyncio.get_running_loop()
    for handle in handles:
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            async with asyncio.timeout(30):
                await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
