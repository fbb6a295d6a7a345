"""Log lines that agents cause, at a bounded rate.

Invariants:
- A session causes at most `MAX_LINES` lines in `period_s`, and after them one line that says how many were left out.
- Requests without a known session count as one session, so that the number of counters is bounded by that of sessions.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_LINES = 5


@dataclass(slots=True, eq=False)
class _Period:
    end: asyncio.TimerHandle
    lines: int = 0
    left_out: int = 0


class LimitedLog:
    """Log for what the sessions of a gateway cause."""

    def __init__(self, *, period_s: float = 60.0) -> None:
        self._period_s = period_s
        self._periods: dict[str, _Period] = {}

    def warning(self, session: str, event: str, *given: object) -> None:
        """Write a line about a session ("": an unknown one)."""
        self._log(logging.WARNING, session, event, given)

    def exception(self, session: str, event: str, *given: object) -> None:
        """Write a line with the traceback of the error that is being handled."""
        self._log(logging.ERROR, session, event, given, True)

    def error(self, session: str, event: str, *given: object, exc_info: BaseException) -> None:
        """Write a line with the traceback of an error."""
        self._log(logging.ERROR, session, event, given, exc_info)

    def _log(
        self, level: int, session: str, event: str, given: tuple[object, ...], error: BaseException | bool = False
    ) -> None:
        period = self._periods.get(session)
        if period is None:
            end = asyncio.get_running_loop().call_later(self._period_s, self._end, session)
            period = self._periods[session] = _Period(end)
        if period.lines >= MAX_LINES:
            period.left_out += 1
            return
        period.lines += 1
        logger.log(level, "%s: %s", _name(session), event % given, exc_info=error)

    def close(self) -> None:
        """End all periods."""
        for session in list(self._periods):
            self._end(session)

    def _end(self, session: str) -> None:
        period = self._periods.pop(session)
        period.end.cancel()
        if period.left_out:
            logger.warning("%s: %d more lines were left out", _name(session), period.left_out)


def _name(session: str) -> str:
    return f"session {session}" if session else "no known session"
