"""Timelines of attempts as HTML: one drawing for each attempt, and a table of its longest segments.

Invariants:
- Every text of an agent is escaped, without control characters, and isolated from the direction of the rest.
- The fragment needs `TIMELINE_STYLE` and nothing else: no script, no network, no style attribute.
- Each segment has its name, begin and end as data attributes, in seconds since the attempt began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from headrace.actors.telemetry.slow.terminal_text import printable
from headrace.actors.telemetry.slow.timelines import (
    AttemptTimeline,
    kind_of_part,
    lanes_of,
    longest_of,
    merged_lines,
    title_of,
)
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import BOOT

WIDTH: Final = 1000
LEFT: Final = 84
"""Units of the column of names, in a drawing that is `WIDTH` wide."""
LANE: Final = 15
AXIS: Final = 20
MAX_LANES: Final = 48
LEAST: Final = 1.0
"""Units of the shortest segment that is drawn."""
TICKS: Final = 8
STEPS_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
LEGEND: Final = {
    "wait": "queue",
    "hold": "hold (gate closed)",
    "prefill": "prefill",
    "decode": "decode",
    "turns": "rest of a turn",
    "tools": "tool",
    "services": "service",
    "sandbox": "boot",
    "failed": "failed boot",
    "agent": "agent's own time",
    "evaluation": "evaluation",
    "rest": "rest",
}

TIMELINE_STYLE: Final = """
.timeline svg { display: block; width: 100%; height: auto; }
.timeline svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.timeline svg line { stroke: currentColor; stroke-opacity: .15; }
.timeline rect { fill: currentColor; }
.timeline rect:hover { stroke: #000; }
.timeline .wait { color: #bf8700; }
.timeline .hold { color: #cf222e; }
.timeline .prefill { color: #54aeff; }
.timeline .decode { color: #0969da; }
.timeline .turns { color: #a5b8cc; }
.timeline .tools { color: #1a7f37; }
.timeline .services { color: #0f7c8a; }
.timeline .sandbox { color: #8250df; }
.timeline .failed { color: #82071e; }
.timeline .agent { color: #c8ced5; }
.timeline .evaluation { color: #bc4c00; }
.timeline .rest { color: #afb8c1; }
.timeline ul { display: flex; flex-wrap: wrap; gap: 0 1em; list-style: none; padding: 0; margin: .3em 0;
  font-size: .87em; }
.timeline i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-inline-end: .3em;
  background: currentColor; }
.timeline table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.timeline caption { text-align: start; }
.timeline th, .timeline td { text-align: end; padding: .15em .6em; border-top: 1px solid #8884; font-weight: normal; }
.timeline th:first-child, .timeline th:last-child, .timeline td:last-child { text-align: start; white-space: normal;
  overflow-wrap: anywhere; }
.timeline td:last-child { width: 55%; font-family: ui-monospace, monospace; font-size: .93em; }
@media (prefers-color-scheme: dark) {
  .timeline .turns { color: #46586b; }
  .timeline .tools { color: #3fb950; }
  .timeline .agent { color: #3d444d; }
  .timeline .rest { color: #656d76; }
  .timeline .failed { color: #ff7b72; }
}
"""


def timeline_fragment(attempts: Sequence[AttemptTimeline]) -> str:
    """Return the timelines, the newest first, as one `<div class="timeline">`, to be shown with `TIMELINE_STYLE`; "" if
    there are none."""
    if not attempts:
        return ""
    drawn = (line for attempt in reversed(attempts) for line in _attempt(attempt, named=len(attempts) > 1))
    return "\n".join(('<div class="timeline">', *drawn, "</div>"))


def _attempt(attempt: AttemptTimeline, *, named: bool) -> Iterator[str]:
    segments = attempt.timeline.segments
    if named:
        yield f"<h3>Attempt {attempt.attempt}</h3>"
    lanes = list(lanes_of(segments))
    shown = lanes[:MAX_LANES]
    height = AXIS + LANE * len(shown)
    scale = (WIDTH - LEFT) / max(attempt.wall_s, 1e-9, *(each.end_s for each in segments))
    yield (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" data-attempt="{attempt.attempt}" '
        f'data-began="{attempt.began_at_s:.4f}" aria-label="Timeline of attempt {attempt.attempt}; the table below '
        'lists its longest segments">'
    )
    yield from _axis(attempt.wall_s, scale, height)
    for number, (track, lane) in enumerate(shown):
        top = AXIS + LANE * number
        if number == 0 or shown[number - 1][0] != track:
            yield f'<text x="0" y="{top + 11}">{track}</text>'
        yield from (_box(each, scale, top) for each in lane)
    yield "</svg>"
    kinds = {kind_of(each) for each in segments}
    keys = (f'<li><i class="{kind}"></i>{text}</li>' for kind, text in LEGEND.items() if kind in kinds)
    yield f"<ul>{''.join(keys)}</ul>"
    if len(lanes) > MAX_LANES:
        yield f"<p>{len(lanes) - MAX_LANES} more lanes are not drawn.</p>"
    yield (
        '<table><caption>The longest segments</caption><thead><tr><th scope="col">part</th><th scope="col">turn</th>'
        '<th scope="col">begin</th><th scope="col">seconds</th><th scope="col">command, engine or host</th></tr>'
        "</thead><tbody>"
    )
    for each in longest_of(segments):
        yield (
            f'<tr><th scope="row">{_isolated(each.part)}</th><td>{each.turn or ""}</td><td>{each.start_s:.2f} s</td>'
            f"<td>{each.seconds:.2f} s</td><td>{_isolated(each.detail)}</td></tr>"
        )
    yield "</tbody></table>"
    yield from (f"<p>{_isolated(line)}.</p>" for line in merged_lines(attempt.timeline))


def _axis(wall_s: float, scale: float, height: float) -> Iterator[str]:
    step_s = next((step for step in STEPS_S if wall_s / step <= TICKS), STEPS_S[-1])
    for number in range(min(TICKS, int(wall_s / step_s)) + 1):
        x = LEFT + number * step_s * scale
        # The last label would leave the drawing.
        anchor = "end" if x > WIDTH - 30 else "start"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>'
        beside = x + (-3 if anchor == "end" else 3)
        yield f'<text x="{beside:.1f}" y="11" text-anchor="{anchor}">{number * step_s:g} s</text>'


def kind_of(segment: Segment) -> str:
    """Return the kind of a segment, which has a colour. A boot that failed has its error behind its host."""
    return "failed" if segment.part == BOOT and ": " in segment.detail else kind_of_part(segment.part)


def _box(segment: Segment, scale: float, top: float) -> str:
    left, width = LEFT + segment.start_s * scale, max(LEAST, segment.seconds * scale)
    return (
        f'<rect class="{kind_of(segment)}" x="{left:.2f}" y="{top + 1:g}" width="{width:.2f}" height="{LANE - 3}" '
        f'data-name="{_text(segment.part)}" data-begin="{segment.start_s:.4f}" data-end="{segment.end_s:.4f}" '
        f'data-turn="{segment.turn}"><title>{_text(title_of(segment))}</title></rect>'
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _isolated(text: str) -> str:
    return f"<bdi>{_text(text)}</bdi>"
