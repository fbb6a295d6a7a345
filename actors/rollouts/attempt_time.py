"""Where the time of one attempt went: the worker's own phases, the pool's boots, the session's turns, and the
evaluator's parts, on one clock.

Invariants:
- Parts do not overlap and add up to the time on the worker; what nobody measured is `other`.
- Times of other processes are lengths on their own clocks, so clocks of hosts need not agree. The session's are placed
  by its opening and its report, each of which happened between a call and its reply; those of the pool and of the
  evaluator likewise. Where between, the hosts' clocks decide.
- Segments of the timeline overlap where calls do; the parts are those of one path through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import Tracer

from headrace.actors.record.files.parts import PartClock, part_clock
from headrace.actors.services.figures import ServiceTime, service_time
from headrace.buffer.primitives.critical_path import Segment, innermost, overlaid
from headrace.buffer.primitives.timed_span import interval_clock, moment_between, timed_span, unix_s
from headrace.buffer.trajectories.breakdown import (
    EVALUATE,
    EVALUATE_QUEUE,
    OTHER,
    OWN,
    Breakdown,
    Label,
    is_of_agent,
    spread,
    summed,
)
from headrace.buffer.trajectories.timeline import Timeline
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.pool.boot import Lease, placed
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
    began_at_s: float | None = field(default_factory=unix_s)
    """Unix time at which the attempt began; None in virtual time."""
    now: str = ""
    """Phase in progress; empty between phases."""
    now_since_s: float = 0.0
    now_s: Callable[[], float] = field(default_factory=interval_clock)
    """The clock of the attempt, in seconds."""
    _began_s: float = field(init=False)
    _phases: list[Segment] = field(default_factory=list)
    _opening: tuple[float, float] | None = None
    _boots: list[Segment] = field(default_factory=list)
    _sessions: list[Segment] = field(default_factory=list)
    _evaluation: list[Segment] = field(default_factory=list)
    _is_evaluated: bool = False
    _inner: PartClock | None = None
    _timeline: Timeline = field(default_factory=Timeline)
    """What overlaps: the turns and calls of sessions."""

    def __post_init__(self) -> None:
        self._began_s = self.now_s()

    def in_progress(self) -> tuple[str, float, float]:
        """Return the part in progress, and the seconds since it began and since the attempt began."""
        now = self.now_s()
        since_s = self.now_since_s
        if not self.now:
            since_s = self._phases[-1].end_s if self._phases else self._began_s
        return (self.now or OTHER), now - since_s, now - self._began_s

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Collect the parts that are measured by what runs in the block: tools and services."""
        with part_clock(self.now_s) as self._inner:
            yield

    @contextmanager
    def clock(self, tracer: Tracer, span: str, phase: str, part: str) -> Iterator[None]:
        """Count the block as a phase and as a part of the breakdown, and record it as a span."""
        timed = None
        self.occupied[phase] += 1
        self.now, self.now_since_s = part, self.now_s()
        try:
            with timed_span(tracer, span, self.now_s) as timed:
                yield
        finally:
            self.now = ""
            self.occupied[phase] -= 1
            if timed is not None:
                self.seconds.append((phase, timed.end_s - timed.start_s))
                self._phases.append(Segment(part, timed.start_s, timed.end_s))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block as a part that belongs to no phase."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self._phases.append(Segment(name, start_s, self.now_s()))

    def split(self, first: str, first_s: float) -> None:
        """Split the first `first_s` seconds off the last phase and record them under another name."""
        name, seconds = self.seconds.pop()
        self.seconds += [(first, first_s), (name, max(0.0, seconds - first_s))]

    def booted(self, lease: Lease | SandboxError, asked_s: float) -> None:
        """Take over the waits and boots of a lease that was asked for at `asked_s` and has just come, or failed."""
        self._boots += placed(lease, asked_s, self.now_s())

    def split_services(self, seconds: Mapping[str, float]) -> None:
        """Split the seconds in services, by name, off the last phase, as phases `service.NAME`."""
        for service, service_s in seconds.items():
            self.split(f"{SERVICE_PHASE}{service}", min(service_s, self.seconds[-1][1]))

    @contextmanager
    def services(self) -> Iterator[ServiceTime]:
        """Measure the time that the block spends in services."""
        with service_time(self.now_s) as measured:
            yield measured

    @contextmanager
    def session_opens(self) -> Iterator[None]:
        """Note that the block opens a session."""
        call_s = self.now_s()
        yield
        self._opening = (call_s, self.now_s())

    def session_ended(self, report: SessionReport, asked_s: float) -> None:
        """Take over the usage of the session, whose report was asked for at `asked_s` and has just come, and its
        counts."""
        usage = report.usage
        length_s = -usage.segments[0][1] if usage.segments else 0.0
        end_s = self._report_time((asked_s, self.now_s()), length_s, usage.reported_at_s)
        self._sessions += [Segment(part, end_s + start, end_s + end) for part, start, end in usage.segments]
        if usage.timeline:
            self._timeline.include(Timeline.from_json(usage.timeline), shift_s=end_s)
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

    def evaluated(self, path: Sequence[Segment], began_s: float, ended_at_s: float | None) -> None:
        """Take over the path of an evaluation that was asked for at `began_s` and has just come: its parts in seconds
        since it began, and the Unix time of its end. What exceeds the evaluator's own time was a wait for it."""
        self._is_evaluated = True
        # An evaluation in this process has measured its own parts.
        if path:
            length_s, now = path[-1].end_s, self.now_s()
            first_s = now if ended_at_s is None else min(now, began_s + length_s)
            shift_s = max(began_s, moment_between(first_s, now, ended_at_s) - length_s)
            self._evaluation.append(Segment(EVALUATE_QUEUE, began_s, shift_s))
            self._evaluation += [each.moved(shift_s) for each in path]

    def _report_time(self, finishing: tuple[float, float], length_s: float, at_s: float | None) -> float:
        """Return when the session reported, on the worker's clock: between the call for the report and its reply, and
        `length_s` after the opening, which was between its own call and reply. `at_s` is its Unix time."""
        first_s, last_s = finishing
        if self._opening is not None:
            from_s, to_s = max(first_s, self._opening[0] + length_s), min(last_s, self._opening[1] + length_s)
            # Of a gateway that restarted meanwhile, the length begins with the restart.
            if from_s <= to_s:
                first_s, last_s = from_s, to_s
        return moment_between(first_s, last_s, at_s)

    def breakdown(self) -> Breakdown:
        """Return the breakdown up to now."""
        end_s = self.now_s()
        base = innermost(self._phases, self._began_s, end_s, idle=OTHER)
        # Of an agent without turns at a gateway nothing else is known.
        agent = OTHER if self._sessions else OWN
        evaluation = OTHER if self._is_evaluated else EVALUATE
        names = {AGENT_PHASE: agent, EVALUATE_PHASE: evaluation}
        path = [each._replace(part=names.get(each.part, each.part)) for each in base]
        for over in (self._boots, self._sessions, self._evaluation):
            path = overlaid(path, [each for each in over if each.part != OTHER])
        timeline = Timeline(began_at_s=self.began_at_s)
        if self._inner is not None:
            inner = self._inner.path(self._began_s, end_s, idle=_GAP)
            path = overlaid(path, [each for each in inner if each.part != _GAP])
            timeline.include(self._inner.timeline, shift_s=-self._began_s)
        timeline.include(self._timeline, shift_s=-self._began_s)
        path = [each.moved(-self._began_s) for each in path]
        # Turns, tools and services have come from those that measured them, side by side; the path has the rest.
        timeline.add_all(each for each in path if each.part == OWN or not is_of_agent(each.part))
        return Breakdown(
            wall_s=end_s - self._began_s,
            parts_s=summed((each.part, each.seconds) for each in path),
            labels=dict(self.labels),
            within_s=spread(path),
            timeline=timeline.settled(),
        )
