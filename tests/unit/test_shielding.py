"""Work that outlives the cancellation of whoever awaits it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from headrace.buffer.primitives.shielding import shielded


async def test_the_result_and_the_error_reach_who_awaits_it() -> None:
    assert await shielded(asyncio.sleep(0, "done")) == "done"

    async def fails() -> None:
        raise ConnectionError("closed")

    with pytest.raises(ConnectionError, match="closed"):
        await shielded(fails())


async def test_abandoned_work_goes_on_and_its_error_is_not_logged() -> None:
    may_end, ended, logged = asyncio.Event(), asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    async def work() -> None:
        await may_end.wait()
        ended.set()
        raise ConnectionError("closed")

    waiting = asyncio.create_task(shielded(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()
    may_end.set()
    async with asyncio.timeout(30):
        await ended.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert logged == []
