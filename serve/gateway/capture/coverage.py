"""Coverage: the share of the sampled tokens that is trained, and the alarm when it is low.

A low share is no fault by itself (side calls are masked on purpose), but it is the first sign of an agent that does not
echo the policy's turns, and of sessions that are cut.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

logger = logging.getLogger(__name__)

LOWEST_SHARE: Final = 0.8
"""Share of trained tokens below which the alarm is raised."""
WINDOW_SESSIONS: Final = 64
LEAST_SESSIONS: Final = 8
"""Number of the latest sessions that are judged together, and the least number that is judged."""

REASONS: Final[Mapping[str, str]] = {
    "abandoned": "the agent continues without the turns: set train to main and abandoned if their answers are used",
    "side": "calls without tools beside an agent with tools: set train to main and side if they are part of the task",
    "aborted": "turns are cut before they end",
    "sampling": "turns were sampled from a restricted distribution",
    "truncated": "turns are cut by the context limit",
    "overrun": "turns go on after their stop strings",
    "stop_border": "stop strings end inside tokens",
}
"""What each reason for masking means, and what can be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Tokens of some sessions: sampled, trained, and masked by reason."""

    sessions: int = 0
    sampled: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def together(cls, several: Iterable[Coverage]) -> Self:
        every, masked = list(several), Counter[str]()
        for coverage in every:
            masked.update(coverage.masked)
        return cls(
            sessions=sum(coverage.sessions for coverage in every),
            sampled=sum(coverage.sampled for coverage in every),
            trained=sum(coverage.trained for coverage in every),
            masked=dict(masked),
        )

    @property
    def is_low(self) -> bool:
        return self.trained < LOWEST_SHARE * self.sampled

    @property
    def reason(self) -> str:
        """The reason that masks most tokens; "" if none is masked."""
        return max(self.masked, key=lambda reason: self.masked[reason], default="")

    @property
    def alarm(self) -> str:
        """What is wrong, in short; "" if the share is not low, or there are too few sessions to tell."""
        if self.sessions < LEAST_SESSIONS or not self.is_low:
            return ""
        return f"{self.trained / self.sampled:.0%} of the sampled tokens are trained ({self.reason})"

    @property
    def advice(self) -> str:
        """What the reason means, and what can be done."""
        return REASONS.get(self.reason, self.reason)


class CoverageWindow:
    """The latest sessions of a gateway. The start of each alarm is logged."""

    def __init__(self) -> None:
        self._sessions: deque[Coverage] = deque(maxlen=WINDOW_SESSIONS)
        self._raised = False

    def add(self, session: Coverage) -> None:
        """Add a finished session; one that sampled nothing does not count."""
        if not session.sampled:
            return
        self._sessions.append(session)
        coverage = self.coverage
        if coverage.alarm and not self._raised:
            logger.warning("last %d sessions: %s: %s", coverage.sessions, coverage.alarm, coverage.advice)
        self._raised = bool(coverage.alarm)

    @property
    def coverage(self) -> Coverage:
        return Coverage.together(self._sessions)
