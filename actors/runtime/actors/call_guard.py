"""Guards for long calls to actors whose process may die or hang.

Invariants:
- A long, idempotent call to a lost actor is repeated once the actor is back.
- An actor that does not answer for `hang_s` is killed, which makes it a lost actor. An actor that is lost for
  `cluster.absent_s` ends the run; until then everything else continues.
- Only time during which this process was running counts: after a pause of the machine or of this process (a migration,
  SIGSTOP), answers may be waiting unread, so no actor is killed because of the pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.record.files.absences import Absences
from headrace.actors.runtime.actors.operations import ABSENCE, until_back
from headrace.actors.runtime.actors.runtime import Runtime

R = TypeVar("R")

GUARD_S = 2.0
"""Interval between checks of an actor."""
SLICE_S: Final = 1.0
"""Longer waits are split into waits of this length, so that a pause is noticed."""
PAUSE_S: Final = 5.0
"""A wait that takes this much longer than requested counts as a pause; a busy event loop is never that late."""
PAUSES_KEPT: Final = 64

logger = logging.getLogger(__name__)


class AwakeClock:
    """Clock that counts the seconds during which this process was running. It must be read at least once every
    `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._longest_s = every_s + PAUSE_S
        self._last_s: float | None = None
        self._paused_s = 0.0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_KEPT)

    def read(self, now_s: float) -> float:
        """Return the awake time at `now_s`, a reading of a clock that does not stop during a pause."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if gap_s > self._longest_s:
            logger.warning("this process was paused for %.0f s", gap_s)
            self._paused_s += gap_s
            self._pauses.append((now_s, gap_s))
        return now_s - self._paused_s

    def paused_within(self, seconds: float) -> float:
        """Return the seconds of pauses within the last `seconds` before the last reading."""
        if self._last_s is None:
            return 0.0
        return sum(gap_s for ended_s, gap_s in self._pauses if ended_s > self._last_s - seconds)


async def keep_running(call: Callable[[], Awaitable[R]], ready: Callable[[], Awaitable[object]]) -> R:
    """Await a long call to an actor. When the actor is lost, wait until `ready` answers, and call again."""
    while True:
        try:
            return await call()
        except ActorLost:
            await until_back(ready)


async def guard(
    runtime: Runtime, name: str, actor: object, hang_s: float, *, absences: Absences | None = None, role: str = ""
) -> NoReturn:
    """Kill an actor whenever it hangs, until cancelled. The callers that await its calls handle its death. While the
    actor is lost it is listed in `absences`, with the `role` of its node. Raises ActorGone once the actor has been lost
    for `cluster.absent_s`."""
    absences = absences or Absences(None)
    process_id: int | None = None
    lost_s = 0.0
    while True:
        await asyncio.sleep(GUARD_S)
        try:
            process_id, _ = await answered(runtime.stats(actor), hang_s)
            lost_s = 0.0
            absences.back(name)
        except ActorLost as lost:
            process_id = None
            lost_s += GUARD_S
            absences.lost(name, role=role)
            if lost_s > ABSENCE.seconds:
                raise ActorGone(
                    f"{lost}; it did not come back within {ABSENCE.seconds:g} s (cluster.absent_s)"
                ) from lost
        except TimeoutError:
            absences.lost(name, role=role)
            if process_id is not None:
                logger.warning("killing actor %s (process %d), which is hung", name, process_id)
                await runtime.restart(actor, process_id)


async def answered(call: Coroutine[Any, Any, R], limit_s: float) -> R:
    """Return the result of a call. Raises TimeoutError if none has arrived within `limit_s` during which this process
    ran without a pause."""
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
