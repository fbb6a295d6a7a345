"""The thread that renders long requests: nobody waits for it at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from headrace.serve.daemon_thread import DaemonThread

GUARD_S = 60

ENDLESS_CALL = """
import asyncio, threading
from headrace.serve.daemon_thread import DaemonThread

async def main():
    thread, begun = DaemonThread("render"), threading.Event()
    waiting = asyncio.ensure_future(thread.run(lambda: (begun.set(), threading.Event().wait())))
    await asyncio.to_thread(begun.wait)
    thread.stop()
    waiting.cancel()

asyncio.run(main())
"""


def test_a_process_ends_while_a_call_runs() -> None:
    subprocess.run([sys.executable, "-c", ENDLESS_CALL], check=True, timeout=GUARD_S)


async def test_results_and_errors_reach_the_caller() -> None:
    thread = DaemonThread("render")
    try:
        assert await thread.run(lambda: threading.current_thread().name) == "render"
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
    finally:
        thread.stop()


async def test_a_call_that_nobody_waits_for_does_not_begin() -> None:
    thread, may_end, ran = DaemonThread("render"), threading.Event(), []
    try:
        first = asyncio.ensure_future(thread.run(lambda: may_end.wait(GUARD_S)))
        second = asyncio.ensure_future(thread.run(lambda: ran.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        may_end.set()
        assert await first
        assert await thread.run(lambda: list(ran)) == []
    finally:
        thread.stop()
