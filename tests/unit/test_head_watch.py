"""The watch of a cluster's head: one line when it stops to answer, one when it is back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.actors.cluster.nodes.head_watch import HeadWatch

WAIT_S = 10.0


class Head:
    """A head that answers, hangs or fails."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()
        self.fails = False
        self._answers: asyncio.Queue[None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.at_once = 0
        self.most_at_once = 0

    def ask(self) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.works.wait(WAIT_S)
        self.at_once -= 1
        self._loop.call_soon_threadsafe(self._answers.put_nowait, None)
        if self.fails:
            raise RuntimeError("deadline exceeded")

    async def answered(self, times: int) -> None:
        async with asyncio.timeout(WAIT_S):
            for _ in range(times):
                await self._answers.get()


class Lines:
    """The lines of a watch, in order."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def add(self, line: str) -> None:
        self._lines.put_nowait(line)

    async def next(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return await self._lines.get()

    @property
    def is_empty(self) -> bool:
        return self._lines.empty()


async def test_a_head_that_hangs_is_named_until_it_answers() -> None:
    head, lines = Head(), Lines()
    watch = HeadWatch(lines.add, ask=head.ask, every_s=0.01, answer_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.watch())
        await head.answered(3)
        assert (watch.problem, lines.is_empty) == ("", True)
        head.works.clear()
        line = await lines.next()
        assert line == watch.problem
        assert line.startswith("the head of the cluster does not answer (head or Redis hang) since 2")
        waiting = tasks.create_task(watch.answers())
        # Several times the limit: it is reported once, by one thread.
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done(), "what calls Ray waits"
        assert lines.is_empty
        head.works.set()
        assert (await lines.next()).startswith("the head of the cluster answers again, after ")
        await waiting
        assert watch.problem == ""
        assert head.most_at_once == 1
        watching.cancel()


async def test_a_head_that_answers_with_errors_counts_as_away() -> None:
    head, lines = Head(), Lines()
    head.fails = True
    watch = HeadWatch(lines.add, ask=head.ask, every_s=0.01, answer_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.watch())
        assert "does not answer" in await lines.next()
        head.fails = False
        assert "answers again" in await lines.next()
        watching.cancel()


@pytest.mark.parametrize("hangs_s", [0.0, 0.04])
async def test_a_slow_answer_is_no_event(hangs_s: float) -> None:
    head, lines = Head(), Lines()
    watch = HeadWatch(lines.add, ask=head.ask, every_s=0.001, answer_s=5.0)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.watch())
        head.works.clear()
        await asyncio.wait([watching], timeout=hangs_s)
        head.works.set()
        await head.answered(3)
        watching.cancel()
    assert lines.is_empty
