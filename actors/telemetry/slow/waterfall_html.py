"""The parts of one rollout beside its cohort as HTML: a fragment for a page, and with its timeline a page of its own.

Invariants:
- Every text of an agent or a task is escaped, without control characters, and isolated from the direction of the rest.
- The fragment needs `STYLE` and nothing else: no script, no network, no style attribute, so a strict CSP allows it.
- Bars are lengths, so all begin at 0; positions are in the timeline.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from headrace.actors.telemetry.slow.cohort import Typical
from headrace.actors.telemetry.slow.rows import RolloutTime, in_order
from headrace.actors.telemetry.slow.terminal_text import limit_of, printable, shown
from headrace.actors.telemetry.slow.timeline_html import TIMELINE_STYLE, timeline_fragment
from headrace.actors.telemetry.slow.timelines import AttemptTimeline
from headrace.actors.telemetry.slow.verdicts import Verdict

WIDTH: Final = 1000
"""Units of a bar's drawing, whatever its width on the screen."""
LONGEST_TEXT: Final = 300
"""Characters of a text that are shown; an agent chooses the names of its tools."""

STYLE: Final = """
.waterfall { --ink: #1b1f24; --faint: #57606a; --line: #d0d7de; --usual: #0969da; --excess: #bc4c00; --typical: #6e7781;
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
.waterfall table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.waterfall caption { text-align: start; color: var(--faint); padding: 0 0 .5em; }
.waterfall th, .waterfall td { border-top: 1px solid var(--line); padding: .3em .5em; text-align: end; }
.waterfall td { white-space: nowrap; }
.waterfall .cohort { color: var(--faint); font-size: .87em; }
.waterfall thead th { border: 0; color: var(--faint); font-weight: normal; }
.waterfall th:first-child { text-align: start; font-weight: normal; overflow-wrap: anywhere; }
.waterfall .bar { width: 45%; padding-inline: 0; }
.waterfall svg { display: block; width: 100%; height: 1.5em; }
.waterfall .usual { fill: var(--usual); }
.waterfall .excess { fill: var(--excess); }
.waterfall .typical { fill: var(--typical); }
.waterfall .cause th, .waterfall .cause td { font-weight: 600; }
.waterfall .verdict { border-inline-start: 4px solid var(--excess); padding-inline-start: .7em; margin-inline: 0; }
.waterfall dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; }
.waterfall dt { color: var(--faint); }
.waterfall dd { margin: 0; overflow-wrap: anywhere; }
.waterfall p { overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .waterfall thead { position: absolute; clip-path: inset(50%); height: 1px; width: 1px; overflow: hidden; }
  .waterfall tbody tr { display: grid; grid-template-columns: 1fr max-content; padding: .3em 0;
    border-top: 1px solid var(--line); }
  .waterfall tbody th, .waterfall tbody td { border: 0; padding: 0 0 0 .7em; }
  .waterfall tbody th { padding: 0; }
  .waterfall .bar { grid-column: 1 / -1; grid-row: 2; width: auto; padding: 0; }
  .waterfall tbody .cohort { grid-column: 1 / -1; grid-row: 3; }
}
@media (prefers-color-scheme: dark) {
  .waterfall { --ink: #e6edf3; --faint: #9aa4af; --line: #30363d; --usual: #58a6ff; --excess: #f0883e;
    --typical: #8b949e; }
}
"""
_KEY: Final = re.compile("`([^`<>]*)`")
PAGE_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: #fff; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #0d1117; } }
"""


def waterfall_page(
    row: RolloutTime,
    typical: Mapping[str, Typical],
    verdict: Verdict | None = None,
    attempts: Sequence[AttemptTimeline] = (),
    *,
    run: str = "",
) -> str:
    """Return one HTML document without any reference to another file."""
    style = PAGE_STYLE + STYLE + TIMELINE_STYLE
    # Nothing but this style may apply, even if a text should ever escape its escaping.
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{allowed}'"
    title = f"Rollout {row.rollout_id}" + (f" of {run}" if run else "")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f'<style>{style}</style></head><body><main class="waterfall">',
            f"<h1>{_text(title)}</h1>",
            timeline_fragment(attempts),
            *_fragment(row, typical, verdict),
            "</main></body></html>",
            "",
        )
    )


def waterfall_fragment(row: RolloutTime, typical: Mapping[str, Typical], verdict: Verdict | None = None) -> str:
    """Return the waterfall as one `<div class="waterfall">`, to be shown with `STYLE`. `typical` is what
    `Cohorts.typical_parts` says about the rollout; `verdict` is given if it was slow."""
    return "\n".join(('<div class="waterfall">', *_fragment(row, typical, verdict), "</div>"))


def _fragment(row: RolloutTime, typical: Mapping[str, Typical], verdict: Verdict | None) -> Iterable[str]:
    running = ", still running" if row.ended_at_s is None else ""
    of_agent = f", agent {_isolated(row.agent)}" if row.agent else ""
    yield (
        f"<p>Attempt {row.attempt}, {row.total_s:.2f} s{running}, task {_isolated(row.task)}{of_agent}, "
        f"issued at step {row.step}.</p>"
    )
    if verdict is not None:
        yield verdict_text(verdict)
    yield (
        "<table><caption>Seconds of each part. The upper bar is this rollout, in another colour beyond "
        "the median of its cohort; the lower one is the cohort, thick up to its median and thin up to its p90."
        "</caption>"
        '<thead><tr><th scope="col">part</th><th scope="col" class="bar">time</th><th scope="col">seconds</th>'
        '<th scope="col" class="cohort">cohort</th></tr></thead><tbody>'
    )
    parts = sorted({*row.parts_s, *(name for name, each in typical.items() if each.p90_s)}, key=in_order)
    longest_s = max((*row.parts_s.values(), *(each.p90_s for each in typical.values())), default=0.0)
    scale = WIDTH / max(longest_s, 1e-9)
    causes = verdict.causes if verdict is not None else ()
    for part in parts:
        seconds, each = row.parts_s.get(part, 0.0), typical.get(part)
        beside = "" if each is None else f"p50 {each.p50_s:.2f}, p90 {each.p90_s:.2f}, n {each.n}"
        bar = bar_of(seconds, each, scale)
        named = ' class="cause"' if part in causes else ""
        yield (
            f'<tr{named}><th scope="row">{_isolated(part)}</th><td class="bar">{bar}</td>'
            f'<td>{seconds:.2f} s</td><td class="cohort">{beside}</td></tr>'
        )
    yield "</tbody></table>"
    waits = [f"{_text(name)} {seconds:.2f} s" for name, seconds in row.waits_s.items() if seconds]
    if waits:
        yield f"<p>After its end: {', '.join(waits)}.</p>"
    if row.labels:
        yield "<dl>"
        yield from (
            f"<dt>{_isolated(name)}</dt><dd>{_isolated(shown(value))}</dd>"
            for name, value in row.labels.items()
            if value not in ("", [], ())
        )
        yield "</dl>"


def verdict_text(verdict: Verdict) -> str:
    causes = " and ".join(_isolated(cause) for cause in verdict.causes)
    factor = "no common factor" if verdict.factor is None else f"common factor {_isolated(verdict.factor.text())}"
    cost = f" It delayed its step by {verdict.cost_s:.1f} s." if verdict.cost_s else ""
    advice = _KEY.sub(r"<code>\1</code>", _text(verdict.advice))
    typical = f"{verdict.p50_s:.1f} s are typical (p95 {limit_of(verdict)}, cohort of {verdict.n})"
    return (
        f'<p class="verdict">Slow: {verdict.total_s:.1f} s where {typical}. Cause: {causes}; {factor}.{cost}<br>'
        f"{advice}</p>"
    )


def bar_of(seconds: float, typical: Typical | None, scale: float) -> str:
    """Return the drawing of one part: its seconds above, the cohort's median and p90 below."""
    p50_s, p90_s = (seconds, 0.0) if typical is None else (typical.p50_s, typical.p90_s)
    boxes = [
        _box("usual", 0.0, min(seconds, p50_s) * scale, 1, 12),
        _box("excess", p50_s * scale, max(0.0, seconds - p50_s) * scale, 1, 12),
    ]
    if typical is not None:
        boxes.append(_box("typical", 0.0, p50_s * scale, 15, 5))
        boxes.append(_box("typical", p50_s * scale, max(0.0, p90_s - p50_s) * scale, 16.5, 2))
    return (
        f'<svg viewBox="0 0 {WIDTH} 24" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f"{''.join(boxes)}</svg>"
    )


def _box(kind: str, left: float, width: float, top: float, height: float) -> str:
    # A part that took any time at all is visible.
    wide = max(2.0, width) if width > 0 else 0.0
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:g}" width="{wide:.1f}" height="{height:g}"/>' if wide else ""


def _text(text: str) -> str:
    shortened = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
    return escape(printable(shortened))


def _isolated(text: str) -> str:
    return f"<bdi>{_text(text)}</bdi>"
