"""What a session's turns took: their time by part, the engines that sampled them, and their tokens.

Invariants:
- All times are of one clock, that of the process that serves the session; nothing is measured inside a sandbox.
- Names of tools come from the policy, so their number is bounded.
- The path attributes each moment to one part; the timeline keeps what overlaps, such as the calls of one answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
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
from headrace.buffer.trajectories.timeline import Timeline, head_of, head_of_call
from headrace.policies.engine import Completion
from headrace.serve.gateway.conversation import ToolCall

MAX_INTERVALS: Final = 20_000
"""Intervals kept per session; the time of later ones is not attributed, and `Timeline.left_out` counts them."""
MAX_CALLS: Final = 64
"""Calls of one answer that have segments of their own; further ones are merged."""
OTHER_TOOL: Final = f"{TOOL}other"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUsage:
    """Where a session's time went. `segments` are (part, start, end) without overlaps, in seconds before the report
    (negative numbers): from the opening of the session, or from the restart of its gateway, to the report. `timeline`
    (`Timeline.to_json`) is in the same time, with what overlaps."""

    segments: tuple[tuple[str, float, float], ...] = ()
    timeline: str = ""
    reported_at_s: float | None = None
    """Unix time of the report on the gateway's clock."""
    engines: tuple[str, ...] = ()
    """Ids of the engines that sampled turns."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy called."""
    prompt_tokens: int = 0
    """Tokens of all prompts, cached ones included."""
    cached_tokens: int = 0
    retractions: int = 0


@dataclass(slots=True)
class _Answer:
    """Turn that was sampled at `sampled_s`, and delivered with these calls at `delivered_s`."""

    turn: int
    sampled_s: float
    delivered_s: float = 0.0
    calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class UsageClock:
    """Collects the usage of one session while it runs. `since_s` is when the collection began. Turns are numbered from
    1 in the order in which they begin."""

    since_s: float
    _intervals: list[Segment] = field(default_factory=list)
    _timeline: Timeline = field(default_factory=Timeline)
    _engines: dict[str, None] = field(default_factory=dict)
    _tools: dict[str, None] = field(default_factory=dict)
    _prompt_tokens: int = 0
    _cached_tokens: int = 0
    _retractions: int = 0
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _sampled: dict[str, _Answer] = field(default_factory=dict)
    """Turns that have not been delivered."""
    _called: dict[str, _Answer] = field(default_factory=dict)
    """Answers with tool calls that the agent has not continued."""

    def next_turn(self) -> int:
        """Return the number of a turn that begins now."""
        return next(self._numbers)

    def add(self, part: str, start_s: float, end_s: float, *, turn: int = 0, detail: str = "") -> None:
        """Add an interval of a part."""
        segment = Segment(part, start_s, end_s, turn, detail)
        self._attribute(segment)
        self._timeline.add(segment)

    def _attribute(self, segment: Segment) -> None:
        if segment.end_s > segment.start_s:
            if len(self._intervals) < MAX_INTERVALS:
                self._intervals.append(segment)
            else:
                self._timeline.left_out += 1

    def asked(self, parent: str, at_s: float) -> None:
        """Note a request that continues the turn `parent`: the time since its answer was that of the called tools. A
        request whose parent is not known, since its history was edited, continues the only open answer."""
        if parent not in self._called and len(self._called) == 1:
            (parent,) = self._called
        if (answer := self._called.pop(parent, None)) is not None:
            self.tool(answer.calls, answer.delivered_s, at_s, turn=answer.turn)

    def answered(self, turn_id: str, at_s: float, *, turn: int = 0) -> None:
        """Note that the engines have sampled a turn."""
        self._sampled[turn_id] = _Answer(turn, at_s)

    def delivered(self, turn_id: str, calls: Iterable[ToolCall], at_s: float) -> None:
        """Note that the last byte of a turn's answer, which makes these calls, has been sent."""
        if (answer := self._sampled.pop(turn_id, None)) is not None:
            self.add(RECORD, answer.sampled_s, at_s, turn=answer.turn)
            answer.calls, answer.delivered_s = tuple(calls), at_s
            if answer.calls:
                self._called[turn_id] = answer

    def tool(self, calls: Iterable[ToolCall], start_s: float, end_s: float, *, turn: int = 0) -> None:
        """Add the time between an answer that makes these calls and the request that continues it: one part, and a
        segment for each call. When a call in a program ended, only the program knows."""
        calls = tuple(calls)
        names = [head_of(call.name) for call in calls]
        known = sorted(set(names))
        for name in known:
            if len(self._tools) < MAX_NAMES:
                self._tools.setdefault(name)
        part = f"{TOOL}{'+'.join(known)}" if all(name in self._tools for name in known) else OTHER_TOOL
        self._attribute(Segment(part[:MAX_NAME_CHARACTERS], start_s, end_s))
        for name, call in zip(names[:MAX_CALLS], calls, strict=False):
            part = f"{TOOL}{name}"[:MAX_NAME_CHARACTERS] if name in self._tools else OTHER_TOOL
            self._timeline.add(Segment(part, start_s, end_s, turn, head_of_call(call.arguments)))
        for _ in calls[MAX_CALLS:]:
            self._timeline.add_merged(OTHER_TOOL, 1, max(0.0, end_s - start_s))

    def called(
        self, engine: str, outcome: Completion | None, start_s: float, end_s: float, *, held_s: float, turn: int = 0
    ) -> None:
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
            self.add(part, start_s, start_s + seconds, turn=turn, detail=engine)
            start_s += seconds
        if outcome is not None:
            self._prompt_tokens += outcome.prompt_tokens
            self._cached_tokens += outcome.cached_tokens
            self._retractions += outcome.retractions

    def usage(self, now_s: float, *, at_s: float | None = None) -> SessionUsage:
        """Return the usage up to now, which is `at_s` in Unix time."""
        path = critical_path(self._intervals, self.since_s, now_s, idle=OWN)
        timeline = Timeline()
        timeline.include(self._timeline, shift_s=-now_s)
        return SessionUsage(
            segments=tuple((each.part, round(each.start_s - now_s, 4), round(each.end_s - now_s, 4)) for each in path),
            timeline=timeline.settled().to_json(),
            reported_at_s=at_s,
            engines=tuple(self._engines),
            tools=tuple(self._tools),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            retractions=self._retractions,
        )
