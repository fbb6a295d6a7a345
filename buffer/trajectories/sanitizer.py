"""Sanitizer for values stored in the ledger: UTF-8 text, 64-bit integers and finite floats, as plain Python types.

Invariants:
- The returned values survive a round trip through SQLite and JSON unchanged.
- Text is cleaned, never refused; a number that cannot be stored raises TypeError, ValueError or OverflowError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, SupportsFloat, SupportsIndex, cast

from headrace.buffer.errors import VersionMismatch
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import (
    MAX_NAME_CHARACTERS,
    MAX_NAMES,
    MAX_PARTS,
    OTHER,
    Breakdown,
    Label,
    summed,
)
from headrace.buffer.trajectories.step_scores import MAX_SCORE, Credit, ScoredStep, StepScores, TokenSpan
from headrace.buffer.trajectories.timeline import Timeline, head_of
from headrace.buffer.trajectories.types import BatchId, CheckpointRef, Trajectory
from headrace.buffer.trajectories.versions import PolicyVersion

MAX_TEXT = 65_536
"""Maximum number of characters in one string. Some strings are written by agents, and a row must stay small."""
MAX_WHOLE = 2**63 - 1
MAX_TURNS = 2**31 - 1


def clean_text(text: object) -> str:
    """Return `text` without lone surrogates (agents print them), cut at MAX_TEXT characters."""
    return str(text)[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def without_surrogates(value: Any) -> Any:
    """Return plain data whose texts can be sent as UTF-8: agents print lone surrogates."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case list():
            return [without_surrogates(item) for item in value]
        case dict():
            return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def plain_int(value: object, *, most: int = MAX_WHOLE) -> int:
    """Return an integer from 0 to `most`, converted from numpy if necessary. Raises TypeError, ValueError."""
    number = int(operator.index(cast("SupportsIndex", value)))
    if not 0 <= number <= most:
        # Python refuses to print a number of thousands of digits.
        size = "a negative one" if number < 0 else f"one of {number.bit_length()} bits"
        raise ValueError(f"expected a whole number from 0 to {most}, not {size}")
    return number


def plain_float(value: object) -> float:
    """Return a finite float, converted from numpy if necessary. Raises TypeError, ValueError, OverflowError."""
    number = float(cast("SupportsFloat", value))
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def plain_version(version: PolicyVersion) -> PolicyVersion:
    """Return the version with Python integers instead of numpy's. Raises VersionMismatch when its parts are not
    integers."""
    try:
        return PolicyVersion(int(operator.index(version.epoch)), int(operator.index(version.step)))
    except (AttributeError, TypeError) as error:
        raise VersionMismatch(f"{version!r} is not a version: pass a PolicyVersion of two whole numbers") from error


def plain_checkpoint(ref: CheckpointRef) -> CheckpointRef:
    """Return the reference with plain Python strings and numbers; the path need not be valid UTF-8. Raises
    VersionMismatch."""
    return CheckpointRef(
        path=clean_text(ref.path),
        version=plain_version(ref.version),
        batch_ids=tuple(BatchId(clean_text(batch_id)) for batch_id in ref.batch_ids),
        chain=str(ref.chain),
    )


def plain_metrics(metrics: object) -> tuple[dict[str, float], int]:
    """Return the metrics that are numbers, and the number of those that are not: a completed step must be recorded
    whatever its metrics are. NaN and infinities are kept."""
    kept: dict[str, float] = {}
    items = list(metrics.items()) if isinstance(metrics, Mapping) else []
    for name, value in items:
        try:
            kept[clean_text(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return kept, len(items) - len(kept)


def plain_scores(scores: StepScores, trajectory: Trajectory | None) -> StepScores:
    """Return the scores in a form that can be stored. Raises ValueError or TypeError if they are out of bounds, or if
    their spans are not trained tokens of the trajectory, each in one span."""
    rows = trajectory.rows if trajectory is not None else ()
    steps = tuple(
        ScoredStep(
            plain_int(turn),
            _bounded("score", score),
            tuple(TokenSpan(plain_int(row), plain_int(start), plain_int(end)) for row, start, end in spans),
        )
        for turn, score, spans in scores.steps
    )
    if len({step.turn for step in steps}) < len(steps):
        raise ValueError("two scores have the same turn")
    ends = [0] * len(rows)
    for row, start, end in sorted(span for step in steps for span in step.spans):
        if row >= len(rows) or not ends[row] <= start < end <= len(rows[row].tokens_T):
            raise ValueError(f"tokens [{start}, {end}) of row {row} are out of range, or belong to two scored steps")
        if not rows[row].loss_mask_T[start:end].all():
            raise ValueError(f"tokens [{start}, {end}) of row {row} belong to a scored step, but are not trained")
        ends[row] = end
    outcome, coefficient = _bounded("outcome", scores.outcome), _bounded("coefficient", scores.coefficient)
    for step in steps:
        _bounded("coefficient x score", coefficient * step.score)
    return StepScores(credit=Credit(scores.credit), outcome=outcome, coefficient=coefficient, steps=steps)


def _bounded(name: str, value: float) -> float:
    number = plain_float(value)
    if abs(number) > MAX_SCORE:
        raise ValueError(f"the {name} {number:g} is not from {-MAX_SCORE:g} to {MAX_SCORE:g}")
    return number


def plain_breakdown(breakdown: Breakdown) -> Breakdown:
    """Return a breakdown, without its timeline, in a form that can be stored: plain numbers and clean, bounded names.
    Parts beyond the bound are added to `other`. Raises ValueError, TypeError for times that are negative or not
    finite."""
    parts: list[tuple[str, float]] = []
    for number, (name, seconds) in enumerate(breakdown.parts_s.items()):
        part = _plain_name(name) if number < MAX_PARTS - 1 else OTHER
        parts.append((part, plain_seconds(seconds)))
    known = {part for part, _ in parts}
    within_s = {
        _plain_name(name): (plain_float(begin), plain_float(end))
        for name, (begin, end) in breakdown.within_s.items()
        if _plain_name(name) in known
    }
    labels = {_plain_name(name): _plain_label(value) for name, value in list(breakdown.labels.items())[:MAX_NAMES]}
    return Breakdown(wall_s=plain_seconds(breakdown.wall_s), parts_s=summed(parts), labels=labels, within_s=within_s)


def plain_timeline(timeline: Timeline) -> Timeline:
    """Return a timeline in a form that can be stored: bounded, with plain numbers and clean texts. Segments that end
    before they begin, or before the attempt began, are counted in `left_out`. Raises ValueError, TypeError for numbers
    that are none or not finite."""
    plain = Timeline(left_out=plain_int(timeline.left_out))
    if timeline.began_at_s is not None:
        plain.began_at_s = plain_seconds(timeline.began_at_s)
    for part, start_s, end_s, turn, detail in timeline.segments:
        begin, end = max(0.0, plain_float(start_s)), plain_float(end_s)
        if end < begin:
            plain.left_out += 1
        plain.add(Segment(_plain_name(part), begin, end, plain_int(turn, most=MAX_TURNS), head_of(str(detail))))
    for part, (number, seconds) in timeline.merged.items():
        plain.add_merged(_plain_name(part), plain_int(number), plain_seconds(seconds))
    return plain.settled()


def _plain_name(name: object) -> str:
    return clean_text(name)[:MAX_NAME_CHARACTERS]


def plain_seconds(value: object) -> float:
    """Return a duration of at least 0 s as a finite float. Raises TypeError, ValueError, OverflowError."""
    seconds = plain_float(value)
    if seconds < 0:
        raise ValueError(f"{seconds} is not a duration in seconds")
    return seconds


def _plain_label(value: Any) -> Label:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, str):
        return _plain_name(value)
    return tuple(_plain_name(name) for name in list(value)[:MAX_NAMES])
