"""Where the time of one attempt went: the worker's own phases, the session's turns, and the evaluator's parts, on one
clock.

Invariants:
- Parts do not overlap and add up to the time on the worker; what nobody measured is `other`.
- Times of other processes are lengths on their own clocks, so clocks of hosts need not agree. The session's are placed
  by its opening and its report, each of which happened between a call and its reply; the evaluator's by the beginning
  of the evaluation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.actors.record.files.parts import part_clock
from headrace.actors.services.figures import ServiceTime, service_time
from headrace.buffer.primitives.critical_path import Segment, innermost, overlaid
from headrace.buffer.trajectories.breakdown import EVALUATE, EVALUATE_QUEUE, OTHER, OWN, Breakdown, Label, summed

if TYPE_CHECKING:
    from headrace.serve.gateway.capture.rows import SessionReport

SERVICE_PHASE: Final = "service."
"""Prefix of the phases of services, which take a part of the agent's time."""
AGENT_PHASE, EVALUATE_PHASE = "agent", "evaluate"
_GAP: Final = ""


@dataclass(slots=True)
class AttemptTime:
    """Seconds per phase in the order in which the phases ended, the intervals of parts, and the attempt's labels."""

    occupied: Counter[str] = field(default_factory=Counter)
    """Number of rollouts in each phase, shared by all of a worker's rollouts."""
    seconds: list[tuple[str, float]] = field(default_factory=list)
    host: str = ""
    labels: dict[str, Label] = field(default_factory=dict)
    now: str = ""
    """Phase in progress; empty between phases."""
    now_since_s: float = 0.0
    _began_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _phases: list[Segment] = field(default_factory=list)
    _opening: tuple[float, float] | None = None
    _sessions: list[Segment] = field(default_factory=list)
    _evaluation: list[Segment] = field(default_factory=list)
    _is_evaluated: bool = False
    _inner: list[Segment] = field(default_factory=list)

    def in_progress(self) -> tuple[str, float, float]:
        """Return the part in progress, and the seconds since it began and since the attempt began."""
        now = asyncio.get_running_loop().time()
        since_s = self.now_since_s
        if not self.now:
            since_s = self._phases[-1].end_s if self._phases else self._began_s
        return (self.now or OTHER), now - since_s, now - self._began_s

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Collect the parts that are measured by what runs in the block: tools and services."""
        clock = asyncio.get_running_loop().time
        with part_clock(clock) as parts:
            try:
                yield
            finally:
                self._inner += parts.intervals

    @contextmanager
    def clock(self, phase: str, part: str) -> Iterator[None]:
        """Count the block as a phase, and as a part of the breakdown."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        self.occupied[phase] += 1
        self.now, self.now_since_s = part, start_s
        try:
            yield
        finally:
            end_s = loop.time()
            self.now = ""
            self.occupied[phase] -= 1
            self.seconds.append((phase, end_s - start_s))
            self._phases.append(Segment(part, start_s, end_s))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block as a part that belongs to no phase."""
        start_s = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._phases.append(Segment(name, start_s, asyncio.get_running_loop().time()))

    def split(self, first: str, first_s: float) -> None:
        """Split the first `first_s` seconds off the last phase and record them under another name."""
        name, seconds = self.seconds.pop()
        self.seconds += [(first, first_s), (name, max(0.0, seconds - first_s))]

    def split_part(self, first: str, first_s: float) -> None:
        """Split the first `first_s` seconds off the last part."""
        last = self._phases.pop()
        border_s = min(last.end_s, last.start_s + first_s)
        self._phases += [Segment(first, last.start_s, border_s), Segment(last.part, border_s, last.end_s)]

    def split_services(self, seconds: Mapping[str, float]) -> None:
        """Split the seconds in services, by name, off the last phase, as phases `service.NAME`."""
        for service, service_s in seconds.items():
            self.split(f"{SERVICE_PHASE}{service}", min(service_s, self.seconds[-1][1]))

    @contextmanager
    def services(self) -> Iterator[ServiceTime]:
        """Measure the time that the block spends in services."""
        with service_time(asyncio.get_running_loop().time) as measured:
            try:
                yield measured
            finally:
                self._inner += measured.intervals

    @contextmanager
    def session_opens(self) -> Iterator[None]:
        """Note that the block opens a session."""
        call_s = asyncio.get_running_loop().time()
        yield
        self._opening = (call_s, asyncio.get_running_loop().time())

    def session_ended(self, report: SessionReport, asked_s: float) -> None:
        """Take over the usage of the session, whose report was asked for at `asked_s` and has just come, and its
        counts."""
        usage = report.usage
        length_s = -usage.segments[0][1] if usage.segments else 0.0
        end_s = self._report_time((asked_s, asyncio.get_running_loop().time()), length_s)
        self._sessions += [Segment(part, end_s + start, end_s + end) for part, start, end in usage.segments]
        self.labels |= {
            "engines": usage.engines,
            "tools": usage.tools,
            "turns": report.turns,
            "prompt_tokens": usage.prompt_tokens,
            "sampled_tokens": report.sampled_tokens,
            "trained_tokens": report.trained_tokens,
            "masked": report.coverage.reason,
            "cached_tokens": usage.cached_tokens,
            "retractions": usage.retractions,
        }
        if report.trajectory is not None:
            spans = (span for row in report.trajectory.rows for span in row.versions)
            self.labels["versions"] = tuple(str(version) for version in sorted({span.version for span in spans}))

    def evaluated(self, parts_s: Mapping[str, float], began_s: float) -> None:
        """Take over the parts of an evaluation that was asked for at `began_s` and has just ended. What exceeds the
        evaluator's own time was a wait for it."""
        self._is_evaluated = True
        waited_s = asyncio.get_running_loop().time() - began_s - sum(parts_s.values())
        # An evaluation in this process has measured its own parts.
        for part, seconds in [(EVALUATE_QUEUE, waited_s), *parts_s.items()] if parts_s else ():
            self._evaluation.append(Segment(part, began_s, began_s + seconds))
            began_s += max(0.0, seconds)

    def _report_time(self, finishing: tuple[float, float], length_s: float) -> float:
        """Return when the session reported, on the worker's clock: between the call for the report and its reply, and
        `length_s` after the opening, which was between its own call and reply. Of what is left, the middle."""
        first_s, last_s = finishing
        if self._opening is not None:
            from_s, to_s = max(first_s, self._opening[0] + length_s), min(last_s, self._opening[1] + length_s)
            # Of a gateway that restarted meanwhile, the length begins with the restart.
            if from_s <= to_s:
                first_s, last_s = from_s, to_s
        return (first_s + last_s) / 2

    def breakdown(self) -> Breakdown:
        """Return the breakdown up to now."""
        end_s = asyncio.get_running_loop().time()
        base = innermost(self._phases, self._began_s, end_s, idle=OTHER)
        # Of an agent without turns at a gateway nothing else is known.
        agent = OTHER if self._sessions else OWN
        evaluation = OTHER if self._is_evaluated else EVALUATE
        names = {AGENT_PHASE: agent, EVALUATE_PHASE: evaluation}
        path = [Segment(names.get(each.part, each.part), each.start_s, each.end_s) for each in base]
        for over in (self._sessions, self._evaluation):
            path = overlaid(path, [each for each in over if each.part != OTHER])
        inner = innermost(self._inner, self._began_s, end_s, idle=_GAP)
        path = overlaid(path, [each for each in inner if each.part != _GAP])
        parts_s = summed((each.part, each.seconds) for each in path)
        return Breakdown(wall_s=end_s - self._began_s, parts_s=parts_s, labels=dict(self.labels))
