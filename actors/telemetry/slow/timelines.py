"""The true timelines of a rollout's attempts: where each segment lay, and the lanes that show what ran side by side.

Invariants:
- Lanes of one track hold segments that do not overlap; a track has as many as ran at once.
- Unix times are those of the worker's clock, and in virtual time of the ledger's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from headrace.actors.errors import RunError
from headrace.actors.telemetry.slow.reading import measured_times
from headrace.buffer.audit.evidence import rows_of
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import (
    BEFORE_AGENT,
    ENGINE_DECODE,
    ENGINE_PREFILL,
    ENGINE_QUEUE,
    EVALUATE_QUEUE,
    GATE,
    OF_EVALUATION,
    OWN,
    QUEUE,
    RELEASE,
    SERVICE,
    TOOL,
    is_of_agent,
)
from headrace.buffer.trajectories.timeline import Timeline

MAX_ATTEMPTS: Final = 8
"""Attempts whose timelines are read, from the newest back."""
LONGEST: Final = 20
"""Segments that are listed beside a drawing."""
TRACKS: Final = ("sandbox", "agent", "turns", "tools", "services", "evaluation", "rest")
KINDS: Final = {
    QUEUE: "wait",
    EVALUATE_QUEUE: "wait",
    GATE: "hold",
    ENGINE_QUEUE: "wait",
    ENGINE_PREFILL: "prefill",
    ENGINE_DECODE: "decode",
}
TOUCHING_S: Final = 2e-4
"""Segments that overlap by less are consecutive: stored times are rounded to half of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimeline:
    """Timeline of one attempt, which took `wall_s` seconds from `began_at_s` (Unix time)."""

    attempt: int
    trace_id: str
    began_at_s: float
    wall_s: float
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Return the attempt with its segments, in Unix time."""
        return {
            "attempt": self.attempt,
            "trace_id": self.trace_id,
            "began_at_s": self.began_at_s,
            "wall_s": self.wall_s,
            "segments": [
                {
                    "name": each.part,
                    "begin_at_s": self.began_at_s + each.start_s,
                    "end_at_s": self.began_at_s + each.end_s,
                    "turn": each.turn,
                    "detail": each.detail,
                }
                for each in self.timeline.segments
            ],
            "merged": {part: each._asdict() for part, each in self.timeline.merged.items()},
            "left_out": self.timeline.left_out,
        }


def timelines_of(rows: JoinedRows, rollout_id: str) -> tuple[AttemptTimeline, ...]:
    """Return the timelines of the newest attempts of a rollout that have ended, in order. Raises RunError."""
    table, ended = ("evaluations", "recorded_at_s") if "/" in rollout_id else ("attempts", "ended_at_s")
    columns = ("attempt", "trace_id", ended, "breakdown", "timeline")
    found = rows.select(
        table, columns, where="rollout_id = ? AND breakdown NOTNULL AND timeline NOTNULL", values=(rollout_id,)
    )
    return tuple(_attempt(*row) for row in sorted(found)[-MAX_ATTEMPTS:])


def read_timelines(run_dir: Path, rollout_id: str) -> tuple[AttemptTimeline, ...]:
    """Read the timelines of a rollout of a run. Raises LedgerRefused, RunError."""
    with rows_of(run_dir) as rows:
        return timelines_of(rows, rollout_id)


def _attempt(attempt: int, trace_id: str, ended_s: float, breakdown: str, timeline: str) -> AttemptTimeline:
    try:
        wall_s, parsed = measured_times(breakdown).wall_s, Timeline.from_json(timeline)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(f"the timeline of attempt {attempt} is damaged: {error!r}") from error
    began_s = ended_s - wall_s if parsed.began_at_s is None else parsed.began_at_s
    return AttemptTimeline(attempt=attempt, trace_id=trace_id, began_at_s=began_s, wall_s=wall_s, timeline=parsed)


def track_of(part: str) -> str:
    """Return the track that shows a part."""
    if part in BEFORE_AGENT or part == RELEASE:
        return "sandbox"
    if part.startswith((TOOL, SERVICE)):
        return "tools" if part.startswith(TOOL) else "services"
    if part in OF_EVALUATION:
        return "evaluation"
    if part == OWN:
        return "agent"
    return "turns" if is_of_agent(part) else "rest"


def kind_of_part(part: str) -> str:
    """Return what a drawing tells apart: the kind of a wait or of an engine's work, else the track of the part."""
    return KINDS.get(part) or track_of(part)


def lanes_of(segments: Iterable[Segment]) -> Iterator[tuple[str, list[Segment]]]:
    """Yield each lane with the name of its track, in the order of tracks: a segment is in the first lane of its track
    that is free when it begins. Segments must come in order of their begin."""
    tracks: dict[str, list[list[Segment]]] = {name: [] for name in TRACKS}
    for each in segments:
        lanes = tracks[track_of(each.part)]
        free = next((lane for lane in lanes if lane[-1].end_s <= each.start_s + TOUCHING_S), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    yield from chain.from_iterable(((name, lane) for lane in lanes) for name, lanes in tracks.items())


def longest_of(segments: Sequence[Segment]) -> list[Segment]:
    """Return the longest segments, the longest first."""
    return sorted(segments, key=lambda each: each.start_s - each.end_s)[:LONGEST]


def title_of(segment: Segment) -> str:
    """Return what a segment was, in words."""
    turn = f"turn {segment.turn}, " if segment.turn else ""
    detail = f": {segment.detail}" if segment.detail else ""
    return f"{turn}{segment.part}, {segment.start_s:.2f} to {segment.end_s:.2f} s ({segment.seconds:.2f} s){detail}"


def merged_lines(timeline: Timeline) -> list[str]:
    """Return a line for what a timeline does not show."""
    lines = [
        f"{each.number} shorter segments of {part} are not shown one by one: {each.seconds:.2f} s"
        for part, each in timeline.merged.items()
    ]
    return lines + ([f"{timeline.left_out} intervals are in no part"] if timeline.left_out else [])
