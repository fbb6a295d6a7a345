"""What a session's turns took: their time by part, the engines that sampled them, and their tokens.

Invariants:
- All times are of one clock, that of the process that serves the session; nothing is measured inside a sandbox.
- Names of tools come from the policy, so their number is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.buffer.breakdown import MAX_NAME_CHARACTERS, MAX_NAMES, OWN, TOOL
from headrace.buffer.primitives.critical_path import Segment, critical_path

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_INTERVALS: Final = 20_000
"""Intervals kept per session; the time of later ones is not attributed."""
OTHER_TOOL: Final = f"{TOOL}other"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUsage:
    """Where a session's time went. `segments` are (part, start, end) without overlaps, in seconds before the report
    (negative numbers): from the opening of the session, or from the restart of its gateway, to the report."""

    segments: tuple[tuple[str, float, float], ...] = ()
    engines: tuple[str, ...] = ()
    """Ids of the engines that sampled turns."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy called."""
    prompt_tokens: int = 0
    """Tokens of all prompts, cached ones included."""
    cached_tokens: int = 0
    retractions: int = 0


@dataclass(slots=True)
class UsageClock:
    """Collects the usage of one session while it runs. `since_s` is when the collection began."""

    since_s: float
    _intervals: list[Segment] = field(default_factory=list)
    _engines: dict[str, None] = field(default_factory=dict)
    _tools: dict[str, None] = field(default_factory=dict)
    _prompt_tokens: int = 0
    _cached_tokens: int = 0
    _retractions: int = 0

    def add(self, part: str, start_s: float, end_s: float) -> None:
        """Add an interval of a part."""
        if end_s > start_s and len(self._intervals) < MAX_INTERVALS:
            self._intervals.append(Segment(part, start_s, end_s))

    def tool(self, names: Iterable[str], start_s: float, end_s: float) -> None:
        """Add the time between an answer that calls these tools and the request that continues it."""
        known = sorted({name[:MAX_NAME_CHARACTERS] for name in names})
        for name in known:
            if len(self._tools) < MAX_NAMES:
                self._tools.setdefault(name)
        part = f"{TOOL}{'+'.join(known)}" if all(name in self._tools for name in known) else OTHER_TOOL
        self.add(part[:MAX_NAME_CHARACTERS], start_s, end_s)

    def sampled(self, engine: str, *, prompt_tokens: int, cached_tokens: int, retractions: int) -> None:
        """Count a completion of an engine."""
        self._engines.setdefault(engine)
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens
        self._retractions += retractions

    def usage(self, now_s: float) -> SessionUsage:
        """Return the usage up to now."""
        path = critical_path(self._intervals, self.since_s, now_s, idle=OWN)
        return SessionUsage(
            segments=tuple((each.part, round(each.start_s - now_s, 4), round(each.end_s - now_s, 4)) for each in path),
            engines=tuple(self._engines),
            tools=tuple(self._tools),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            retractions=self._retractions,
        )
