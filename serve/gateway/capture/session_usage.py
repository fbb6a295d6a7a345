"""What a session's turns took: their time by part, the engines that sampled them, and their tokens.

Invariants:
- All times are of one clock, that of the process that serves the session; nothing is measured inside a sandbox.
- Names of tools come from the policy, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from headrace.buffer.primitives.critical_path import Segment, critical_path
from headrace.buffer.trajectories.breakdown import (
    ENGINE,
    ENGINE_DECODE,
    ENGINE_PREFILL,
    ENGINE_QUEUE,
    GATE,
    MAX_NAME_CHARACTERS,
    MAX_NAMES,
    OWN,
    RECORD,
    TOOL,
)
from headrace.policies.engine import Completion

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
    _sampled: dict[str, float] = field(default_factory=dict)
    """When turns that have not been delivered were sampled."""
    _called: dict[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    """When answers with tool calls that the agent has not continued were delivered, and the tools."""

    def add(self, part: str, start_s: float, end_s: float) -> None:
        """Add an interval of a part."""
        if end_s > start_s and len(self._intervals) < MAX_INTERVALS:
            self._intervals.append(Segment(part, start_s, end_s))

    def asked(self, parent: str, at_s: float) -> None:
        """Note a request that continues the turn `parent`: the time since its answer was that of the called tools. A
        request whose parent is not known, since its history was edited, continues the only open answer."""
        if parent not in self._called and len(self._called) == 1:
            (parent,) = self._called
        if (called := self._called.pop(parent, None)) is not None:
            self.tool(called[1], called[0], at_s)

    def answered(self, turn: str, at_s: float) -> None:
        """Note that the engines have sampled a turn."""
        self._sampled[turn] = at_s

    def delivered(self, turn: str, tools: Iterable[str], at_s: float) -> None:
        """Note that the last byte of a turn's answer, which calls these tools, has been sent."""
        if (sampled_s := self._sampled.pop(turn, None)) is not None:
            self.add(RECORD, sampled_s, at_s)
            if names := tuple(tools):
                self._called[turn] = (at_s, names)

    def tool(self, names: Iterable[str], start_s: float, end_s: float) -> None:
        """Add the time between an answer that calls these tools and the request that continues it."""
        known = sorted({name[:MAX_NAME_CHARACTERS] for name in names})
        for name in known:
            if len(self._tools) < MAX_NAMES:
                self._tools.setdefault(name)
        part = f"{TOOL}{'+'.join(known)}" if all(name in self._tools for name in known) else OTHER_TOOL
        self.add(part[:MAX_NAME_CHARACTERS], start_s, end_s)

    def called(self, engine: str, outcome: Completion | None, start_s: float, end_s: float, *, held_s: float) -> None:
        """Note a call of an engine, which a closed gate held for `held_s`; `outcome` is None if it failed. The parts of
        its time are those that the engine reports, and the rest is one part: the way to the engine and back, or all of
        it without a report. An engine that does not report its total has decoded for the rest."""
        self._engines.setdefault(engine)
        held_s = min(held_s, end_s - start_s)
        if outcome is None or outcome.queue_s is None or outcome.prefill_s is None:
            lengths = [(GATE, held_s), (ENGINE, end_s - start_s - held_s)]
        else:
            # An engine counts a pause as a part of what the request was doing then.
            worked_s = end_s - start_s - held_s
            queue_s = min(max(0.0, outcome.queue_s), worked_s)
            prefill_s = min(max(0.0, outcome.prefill_s), worked_s - queue_s)
            decode_s = left_s = worked_s - queue_s - prefill_s
            if outcome.total_s is not None:
                decode_s = min(max(0.0, outcome.total_s - queue_s - prefill_s), left_s)
            reported = [(ENGINE_QUEUE, queue_s), (ENGINE_PREFILL, prefill_s), (GATE, held_s), (ENGINE_DECODE, decode_s)]
            lengths = [(ENGINE, left_s - decode_s), *reported]
        for part, seconds in lengths:
            self.add(part, start_s, start_s + seconds)
            start_s += seconds
        if outcome is not None:
            self._prompt_tokens += outcome.prompt_tokens
            self._cached_tokens += outcome.cached_tokens
            self._retractions += outcome.retractions

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
