"""Watch of the cluster's head: whether it answers a call that reaches its Redis.

Invariants:
- The call runs in a daemon thread, one at a time, so a head or a Redis that hangs for hours costs one thread.
- A call that fails counts like one that does not return: only an answer shows that the head works.
- Each change is reported once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn

from headrace.buffer.core.outages import utc
from headrace.buffer.primitives.daemon_thread import start_in_thread

EVERY_S: Final = 10.0
"""Interval between two calls."""
ANSWER_S: Final = 15.0
"""Time without an answer after which the head counts as away."""

logger = logging.getLogger(__name__)


def ask_head() -> None:
    """Read a key from the head's store, which is its Redis. Blocks; raises errors of Ray."""
    from ray.experimental.internal_kv import _internal_kv_get

    _internal_kv_get(b"head_watch", namespace=b"headrace")


class HeadWatch:
    """Watch that calls `changed` with a line when the head stops to answer, and when it answers again."""

    def __init__(
        self,
        changed: Callable[[str], None],
        *,
        ask: Callable[[], object] = ask_head,
        every_s: float = EVERY_S,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._changed, self._ask, self._clock = changed, ask, clock
        self._every_s, self._answer_s = every_s, answer_s
        self._away_s: float | None = None
        self._answers = asyncio.Event()
        self._answers.set()

    @property
    def problem(self) -> str:
        """A line about a head that does not answer; empty if it does."""
        if self._away_s is None:
            return ""
        return f"the head of the cluster does not answer (head or Redis hang) since {utc(self._away_s)}"

    async def answers(self) -> None:
        """Wait until the head answers. What calls Ray waits here first: its calls block while the head is away."""
        await self._answers.wait()

    async def watch(self) -> NoReturn:
        """Call the head regularly, until cancelled."""
        while True:
            await self._await_answer()
            await asyncio.sleep(self._every_s)

    async def _await_answer(self) -> None:
        """Return once the head has answered, which may take hours."""
        asked_s = self._clock()
        while True:
            answer = start_in_thread(self._ask, name="head-watch")
            while not (await asyncio.wait([answer], timeout=self._left(asked_s)))[0]:
                self._missing(asked_s)
            if (error := answer.exception()) is None:
                break
            logger.warning("the head of the cluster answers with an error: %r", error)
            if self._clock() - asked_s >= self._answer_s:
                self._missing(asked_s)
            await asyncio.sleep(min(1.0, self._every_s))
        if self._away_s is not None:
            away_s, self._away_s = self._clock() - self._away_s, None
            self._answers.set()
            self._changed(f"the head of the cluster answers again, after {away_s:.0f} s")

    def _left(self, asked_s: float) -> float:
        """Return the time for which an answer may still be missing; afterwards, an interval of further waits."""
        left_s = asked_s + self._answer_s - self._clock()
        return left_s if left_s > 0 else self._answer_s

    def _missing(self, asked_s: float) -> None:
        if self._away_s is None:
            self._away_s = asked_s
            self._answers.clear()
            logger.error("%s", self.problem)
            self._changed(self.problem)
