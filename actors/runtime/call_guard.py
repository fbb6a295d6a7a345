"""Long calls of actors whose process may die or hang.

Invariants:
- A long call of a lost actor is made again when the actor is back; what it repeats is idempotent.
- An actor that answers nothing for `hang_s` is killed: then it is a lost actor like any other. One that is lost for
  `cluster.absent_s` ends the run; until then everything else goes on.
- Only time in which this process ran counts: after a pause of the machine, or of this process (a migration, SIGSTOP),
  answers are there that could not be heard, and nobody is killed for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.runtime.retry import ABSENCE, until_back

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any, NoReturn

    from headrace.actors.runtime.runtime import Runtime

R = TypeVar("R")

GUARD_S = 2.0
"""How often an actor is asked whether it is alive."""
SLICE_S: Final = 1.0
"""A longer wait is made of waits of this length, so that a pause shows."""
PAUSE_S: Final = 5.0
"""A wait that took this much longer than it was asked to was a pause; a busy loop is not that late."""
PAUSES_KEPT: Final = 64

logger = logging.getLogger(__name__)


class AwakeClock:
    """Seconds in which this process ran, for somebody who reads it at least every `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._longest_s = every_s + PAUSE_S
        self._last_s: float | None = None
        self._paused_s = 0.0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_KEPT)

    def read(self, now_s: float) -> float:
        """The awake time at `now_s` of any clock that goes on in a pause."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if gap_s > self._longest_s:
            logger.warning("this process was paused for %.0f s", gap_s)
            self._paused_s += gap_s
            self._pauses.append((now_s, gap_s))
        return now_s - self._paused_s

    def paused_within(self, seconds: float) -> float:
        """How much of the last so many seconds before the last reading were pauses."""
        if self._last_s is None:
            return 0.0
        return sum(gap_s for ended_s, gap_s in self._pauses if ended_s > self._last_s - seconds)


async def keep_running(call: Callable[[], Awaitable[R]], ready: Callable[[], Awaitable[object]]) -> R:
    """Await a long call of an actor; when the actor is lost, wait until `ready` answers and call again."""
    while True:
        try:
            return await call()
        except ActorLost:
            await until_back(ready)


async def guard(runtime: Runtime, name: str, actor: object, hang_s: float) -> NoReturn:
    """Kill an actor whenever it hangs, until cancelled; what its death means is handled where its calls are awaited.
    Raises ActorGone when it is lost for `cluster.absent_s`."""
    process_id: int | None = None
    lost_s = 0.0
    while True:
        await asyncio.sleep(GUARD_S)
        try:
            process_id, _ = await answered(runtime.stats(actor), hang_s)
            lost_s = 0.0
        except ActorLost as lost:
            process_id = None
            lost_s += GUARD_S
            if lost_s > ABSENCE.seconds:
                raise ActorGone(f"{lost}; it was not back after {ABSENCE.seconds:g} s (cluster.absent_s)") from lost
        except TimeoutError:
            if process_id is not None:
                logger.warning("actor %s (process %d) hangs and is killed", name, process_id)
                await runtime.restart(actor, process_id)


async def answered(call: Coroutine[Any, Any, R], limit_s: float) -> R:
    """The answer of a call. TimeoutError when none came in `limit_s` during which this process ran without a pause."""
    now = asyncio.get_running_loop().time
    answer = asyncio.ensure_future(call)
    left_s = limit_s
    try:
        while left_s > 0:
            began_s, asked_s = now(), min(SLICE_S, left_s)
            if (await asyncio.wait([answer], timeout=asked_s))[0]:
                return answer.result()
            took_s = now() - began_s
            left_s = limit_s if took_s > asked_s + PAUSE_S else left_s - took_s
    finally:
        answer.cancel()
    raise TimeoutError
