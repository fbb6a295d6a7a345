"""Ticks of an event loop, for measurements: how long anything held it.

Invariant: the monitor runs only if `HEADRACE_TICKER` names a folder, where it writes one file per process: the number
of seconds by which the largest gap between two ticks so far exceeded the tick interval.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

FOLDER_KEY: Final = "HEADRACE_TICKER"
TICK_S: Final = 0.05


def begin_ticking(name: str) -> asyncio.Task[None] | None:
    """Start the monitor in the running loop, if `HEADRACE_TICKER` is set."""
    folder = os.environ.get(FOLDER_KEY)
    if not folder:
        return None
    return asyncio.get_running_loop().create_task(_tick(Path(folder) / f"{name}-{os.getpid()}"))


async def _tick(path: Path) -> None:
    loop = asyncio.get_running_loop()
    last_s, largest_s = loop.time(), 0.0
    while True:
        await asyncio.sleep(TICK_S)
        now_s = loop.time()
        if (gap_s := now_s - last_s - TICK_S) > largest_s:
            largest_s = gap_s
            path.write_text(f"{gap_s:.4f}")  # noqa: ASYNC240 - a few bytes, and only in the bench
        last_s = now_s
