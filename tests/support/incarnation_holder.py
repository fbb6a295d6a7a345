"""A process that holds an incarnation until it must end: `python -m support.incarnation_holder STORAGE`.

Prints `holding` once it may act, and then the error that ended it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from headrace.actors.errors import RunError
from headrace.actors.record.storage.incarnation import FenceConfig, Incarnation

QUICK: Final = FenceConfig(renew_s=0.2, end_after_s=3.0, takeover_s=8.5, margin_s=5.0)


async def hold(storage: Path) -> None:
    """Take and hold an incarnation."""
    incarnation = await Incarnation.take(storage, QUICK)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(incarnation.hold())
        await incarnation.acquire()
        print("holding", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(hold(Path(sys.argv[1])))
    except* RunError as errors:
        for error in errors.exceptions:
            print(f"{type(error).__name__}: {error}", flush=True)
