"""Daemon thread for long renders, which does not delay the exit of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from headrace.serve.gateway.rendering.work import DaemonThread

GUARD_S = 60

ENDLESS_CALL = """
import asyncio, threading
from headrace.serve.gateway.rendering.work import DaemonThread

async def main():
    thread, begun = DaemonThread("render"), threading.Event()
    waiting = asyncio.ensure_future(thread.run(lambda: (begun.set(), threading.Event().wait())))
    await asyncio.to_thread(begun.wait)
    thread.stop()
    waiting.cancel()

asyncio.run(main())
"""


def test_a_process_can_exit_while_a_call_is_running() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDLESS_CALL], capture_output=True, timeout=GUARD_S)
    assert (ended.returncode, ended.stderr) == (0, b"")


async def test_results_and_errors_reach_the_caller() -> None:
    thread = DaemonThread("render")
    try:
        assert await thread.run(lambda: threading.current_thread().name) == "render"
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
    finally:
        thread.stop()


async def test_a_call_whose_waiter_is_cancelled_does_not_start() -> None:
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


class LooksFull(SimpleQueue[Any]):
    """Queue from which the thread takes the last call just after a check of its size."""

    def empty(self) -> bool:
        return False


def test_stop_does_not_wait_for_a_running_call() -> None:
    thread = DaemonThread("render")
    thread.stop()
    thread._thread.join(10)
    thread._calls = LooksFull()
    stopping = threading.Thread(target=thread.stop, daemon=True)
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive()
