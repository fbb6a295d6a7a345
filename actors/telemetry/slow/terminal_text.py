"""Verdicts, timelines and parts of rollouts as lines for a terminal.

Invariant: what agents wrote (names of tools) is printed without control characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from headrace.actors.errors import ConfigError
from headrace.actors.telemetry.slow.cohort import Cohorts, Typical
from headrace.actors.telemetry.slow.moments import time_text
from headrace.actors.telemetry.slow.rows import RolloutTime, RunTimes, in_order
from headrace.actors.telemetry.slow.timelines import AttemptTimeline, kind_of_part, lanes_of, longest_of, merged_lines
from headrace.actors.telemetry.slow.verdicts import SlowReport, Verdict, explain
from headrace.buffer.trajectories.breakdown import BOOT

BAR: Final = 40
"""Characters of the longest bar."""
CAUSES: Final = 3
COLUMNS: Final = 96
"""Characters of a timeline."""
MOST_LANES: Final = 24
LONGEST_LINES: Final = 10
LETTERS: Final = {
    "wait": "q",
    "hold": "h",
    "prefill": "p",
    "decode": "d",
    "sandbox": "s",
    "agent": "o",
    "turns": "w",
    "tools": "t",
    "services": "v",
    "evaluation": "e",
    "rest": ".",
}
"""Letters of the kinds of parts in a timeline; a boot has its own."""
KEY_OF_LETTERS: Final = (
    "letters: q queue, b boot, s other work on the sandbox, h hold (gate closed), p prefill, d decode, "
    "w rest of a turn, t tool, v service, o agent's own time, e evaluation, . rest; every other call in capitals"
)


def printable(text: str) -> str:
    """Return the text without characters that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def chosen(report: SlowReport, *, since: int | None, step: int | None) -> list[Verdict]:
    """Return the verdicts on rollouts issued at version `step`, or at `since` and later."""
    return [
        verdict
        for verdict in report.verdicts
        if (since is None or verdict.step >= since) and (step is None or verdict.step == step)
    ]


def slow_lines(report: SlowReport, verdicts: Sequence[Verdict], top: int) -> list[str]:
    """Return the causes of a run, then the costliest verdicts, then what is missing."""
    lines = [f"{len(verdicts)} of {report.rollouts} rollouts were slow"]
    if not verdicts:
        lines = [f"none of {report.rollouts} rollouts was slow"]
    elif (crowd := report.crowd) is not None:
        when = time_text(crowd.begin_s, crowd.end_s)
        lines.append(f"{crowd.rollouts} of all {len(report.verdicts)} slow ones fall into one stretch: {when}")
    lines += [f"cause: {printable(cause.line())}" for cause in report.causes[:CAUSES] if verdicts]
    if report.outside_agent is not None and verdicts:
        lines.append(f"{report.outside_agent:.0%} of the time above typical was spent outside the agent")
    lines += [printable(line) for verdict in verdicts[:top] for line in verdict_lines(verdict)]
    return [*lines, *(f"note: {printable(line)}" for line in report.missing)]


def verdict_lines(verdict: Verdict) -> Iterable[str]:
    """Return the lines of one verdict: the rollout, its cause, and what to do."""
    running = " so far" if verdict.running else ""
    typical = f"(typical {verdict.p50_s:.1f} s, p95 {limit_of(verdict)}, cohort of {verdict.n})"
    name = f"{verdict.rollout_id}.{verdict.attempt}"
    yield f"{name}  {verdict.total_s:.1f} s{running}  {typical}  step {verdict.step}  task {verdict.task}"
    parts = {part.part: part for part in verdict.parts}
    named = [
        f"{cause} {parts[cause].seconds:.1f} s (typical {parts[cause].p50_s:.1f} s)" if cause in parts else cause
        for cause in verdict.causes
    ]
    factor = "no common factor" if verdict.factor is None else f"common factor: {verdict.factor.text()}"
    cost = f"; delayed its step by {verdict.cost_s:.1f} s" if verdict.cost_s else ""
    yield f"    {' and '.join(named)}; {factor}{cost}"
    yield f"    {verdict.advice}"


def limit_of(verdict: Verdict) -> str:
    """Return the 95th percentile of the rollout's cohort, which is unknown if too many of it were stopped."""
    return f"{verdict.p95_s:.1f} s" if math.isfinite(verdict.p95_s) else "unknown"


def whole_id(given: str, ids: Iterable[str]) -> str:
    """Return the id of a rollout by itself or an unambiguous beginning of it. Raises ConfigError."""
    found = [each for each in ids if each.startswith(given)]
    if given in found:
        return given
    if not found:
        raise ConfigError(f"rollout {given}: the run has none of this id; `headrace trace slow RUN` lists ids")
    if len(found) > 1:
        some = ", ".join(found[:3])
        raise ConfigError(f"rollout {given}: {len(found)} rollouts begin with this ({some}, ...); name one of them")
    return found[0]


def place_of_rollout(times: RunTimes, given: str) -> int:
    """Return the place of a rollout by its id or an unambiguous beginning of it. Raises ConfigError."""
    ids = [row.rollout_id for row in times.rows]
    return ids.index(whole_id(given, ids))


def waterfall(times: RunTimes, place: int) -> tuple[RolloutTime, dict[str, Typical], Verdict | None]:
    """Return a rollout, what is typical of each part in its cohort, and the verdict on it if it was slow."""
    row = times.rows[place]
    verdict = next((each for each in explain(times).verdicts if each.rollout_id == row.rollout_id), None)
    return row, Cohorts(times.rows).typical_parts(place), verdict


def waterfall_lines(
    row: RolloutTime,
    typical: dict[str, Typical],
    verdict: Verdict | None = None,
    attempts: Sequence[AttemptTimeline] = (),
) -> list[str]:
    """Return the timelines of a rollout, then one line for each part: its seconds, as a bar too, and what is typical
    beside it."""
    running = "  still running" if row.ended_at_s is None else ""
    name = f"rollout {row.rollout_id} attempt {row.attempt}"
    lines = [f"{name}  {row.total_s:.2f} s{running}  task {row.task}  agent {row.agent}"]
    for attempt in attempts:
        lines += timeline_lines(attempt)
    scale = BAR / max(max(row.parts_s.values(), default=0.0), 1e-9)
    for part in sorted({*row.parts_s, *(name for name, each in typical.items() if each.p90_s)}, key=in_order):
        seconds, each = row.parts_s.get(part, 0.0), typical.get(part)
        bar = ("#" * max(1 if seconds else 0, round(seconds * scale))).ljust(BAR)
        beside = f"p50 {each.p50_s:8.3f}  p90 {each.p90_s:8.3f}  n {each.n}" if each else ""
        lines.append(f"{part[:24]:24} {seconds:9.3f} s |{bar}| {beside}")
    lines += [f"{name:24} {seconds:9.3f} s  after its end" for name, seconds in row.waits_s.items() if seconds]
    lines.append("labels: " + "  ".join(f"{name} {shown(value)}" for name, value in row.labels.items()))
    lines += [] if verdict is None else ["slow:", *verdict_lines(verdict)]
    return [printable(line) for line in lines]


def timeline_lines(attempt: AttemptTimeline) -> list[str]:
    """Return the lanes of an attempt, a letter for each segment, then its longest segments."""
    segments = attempt.timeline.segments
    scale = COLUMNS / max(attempt.wall_s, 1e-9, *(each.end_s for each in segments))
    lines = [f"attempt {attempt.attempt}: {attempt.wall_s:.2f} s, {attempt.wall_s / COLUMNS:.3g} s a column"]
    lanes, above = list(lanes_of(segments)), ""
    for track, lane in lanes[:MOST_LANES]:
        cells = [" "] * COLUMNS
        letters = ["b" if each.part == BOOT else LETTERS[kind_of_part(each.part)] for each in lane]
        if track in ("tools", "services"):
            # Calls that touch are told apart.
            letters[1::2] = map(str.upper, letters[1::2])
        # Of several in one column the longest shows.
        for each, letter in sorted(zip(lane, letters, strict=True), key=lambda pair: pair[0].seconds):
            first = min(COLUMNS - 1, int(each.start_s * scale))
            last = max(first + 1, min(COLUMNS, round(each.end_s * scale)))
            cells[first:last] = letter * (last - first)
        lines.append(f"{'' if track == above else track:12}|{''.join(cells)}|")
        above = track
    if len(lanes) > MOST_LANES:
        lines.append(f"{'':12} and {len(lanes) - MOST_LANES} more lanes")
    lines += [KEY_OF_LETTERS, "longest: begin, seconds, turn, part, and its command, engine or host:"]
    lines += [
        f"{each.start_s:9.2f} {each.seconds:9.2f} s  {each.turn or '':>4}  {each.part[:24]:24} {each.detail}"
        for each in longest_of(segments)[:LONGEST_LINES]
    ]
    return lines + merged_lines(attempt.timeline)


def shown(value: Any) -> str:
    """Return a label's value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
