"""Causes of slowness that lie in time, planted in the times of a simulated run: a window in which a part takes longer,
a stop of everything, and a level that changes for good.

Invariants:
- Only times, ends and positions change, as if the cause had been there; that later rollouts would begin later is left
  out. The rows know nothing of the cause.
- A rollout is affected if the planted seconds are at least half of the planted excess.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benches.verdicts.planted import EXCESS, Cause
from headrace.actors.telemetry.slow.factors import Factor
from headrace.actors.telemetry.slow.rows import DISPATCH, RolloutTime, RunTimes, in_order
from headrace.buffer.trajectories.breakdown import BOOT, ENGINE_DECODE, EVALUATE_CHECK, OWN, RENDER, TOOL

GATEWAYS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What was planted: rows with it, the rollouts that it affected, the window in Unix time, the part, and the label
    that it has, if any."""

    times: RunTimes
    affected: frozenset[str]
    begin_s: float
    end_s: float
    part: str
    usual_s: float
    """Median time of a rollout."""
    label: tuple[str, str] | None = None

    def is_part(self, part: str) -> bool:
        """Return whether the cause prolongs this part."""
        return part == self.part

    def is_factor(self, factor: Factor) -> bool:
        """Return whether this factor is the planted label, or the planted time: a level within one and a half usual
        rollouts of it, a window if it covers two fifths of it and is at most twice as long, and two usual rollouts."""
        if self.label is not None and (factor.kind, factor.value) == self.label:
            return True
        if factor.begin_s is None or not math.isfinite(self.begin_s):
            return False
        if factor.end_s is None:
            return abs(factor.begin_s - self.begin_s) <= 1.5 * self.usual_s
        length_s = self.end_s - self.begin_s
        both_s = min(factor.end_s, self.end_s) - max(factor.begin_s, self.begin_s)
        return both_s >= 0.4 * length_s and factor.end_s - factor.begin_s <= 2 * (length_s + self.usual_s)


def with_gateways(times: RunTimes) -> RunTimes:
    """Return the run with a gateway for each rollout, in turn."""
    rows = (
        replace(row, labels={**row.labels, "gateway": f"gateway-{number % GATEWAYS}"})
        for number, row in enumerate(times.rows)
    )
    return replace(times, rows=tuple(rows))


def engine_for_a_while(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """An engine is slow for a quarter of the run."""
    name = chance.choice(sorted({name for row in times.rows for name in _values(row, "engines")}))
    return _slow_within(times, _window(times, chance, 0.25), ENGINE_DECODE, excess_s, ("engines", name))


def gateway(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """A gateway is slow for the whole run."""
    times, name = with_gateways(times), f"gateway-{chance.randrange(GATEWAYS)}"
    return _slow_within(times, (-math.inf, math.inf), RENDER, excess_s, ("gateway", name))


def gateway_stops(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """All gateways stop once, as long as the excess."""
    return _stopped(with_gateways(times), chance, RENDER, excess_s)


def everything_stops(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """All processes stop once."""
    return _stopped(times, chance, OWN, excess_s)


def ledger_for_a_while(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """Writes of the ledger are slow for an eighth of the run."""
    return _slow_within(times, _window(times, chance, 0.125), DISPATCH, excess_s)


def level(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """A part takes longer from some time on."""
    part = chance.choice((DISPATCH, BOOT, EVALUATE_CHECK))
    begin_s, _ = _window(times, chance, 0.25)
    return _slow_within(times, (begin_s, math.inf), part, excess_s)


def something_for_a_while(times: RunTimes, chance: random.Random, excess_s: float) -> Plant:
    """Some part takes longer within some window, for all rollouts or those of one host, image or engine."""
    tools = sorted({part for row in times.rows for part in row.parts_s if part.startswith(TOOL)})
    part, kinds = chance.choice(
        (
            (BOOT, ("", "host", "image")),
            (ENGINE_DECODE, ("", "engines")),
            (chance.choice(tools), ("", "host")),
            (EVALUATE_CHECK, ("",)),
        )
    )
    kind = chance.choice(kinds)
    values = {value for row in times.rows for value in _values(row, kind)}
    value = chance.choice(sorted(values)) if kind else ""
    window = _window(times, chance, chance.uniform(0.06, 0.3))
    return _slow_within(times, window, part, excess_s, (kind, value) if kind else None)


MOMENTS: Final[Mapping[Cause, Callable[[RunTimes, random.Random, float], Plant]]] = {
    Cause.ENGINE_WINDOW: engine_for_a_while,
    Cause.GATEWAY: gateway,
    Cause.GATEWAY_STOP: gateway_stops,
    Cause.STOP: everything_stops,
    Cause.LEDGER_WINDOW: ledger_for_a_while,
    Cause.LEVEL: level,
    Cause.WINDOW: something_for_a_while,
}


def plant_moment(times: RunTimes, cause: Cause, seed: int, draw: int) -> Plant:
    """Plant a cause of `MOMENTS` in a run without one."""
    chance = random.Random(f"moment {seed} {cause} {draw}")
    return MOMENTS[cause](times, chance, chance.uniform(*EXCESS) * median_total_s(times))


def _values(row: RolloutTime, kind: str) -> tuple[str, ...]:
    value = row.labels.get(kind, ())
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (str(value),)


def _window(times: RunTimes, chance: random.Random, share: float) -> tuple[float, float]:
    """Return a window of this share of the run, away from its ends."""
    first_s = min(row.issued_at_s for row in times.rows)
    length_s = max(row.ended_at_s or 0.0 for row in times.rows) - first_s
    begin_s = first_s + length_s * chance.uniform(0.2, 0.85 - share)
    return begin_s, begin_s + share * length_s


def _extent(row: RolloutTime, part: str) -> tuple[float, float]:
    """Return when a part lay, or would have."""
    if part == DISPATCH or row.began_at_s is None or row.ended_at_s is None:
        return row.last_issued_at_s, row.ended_at_s or row.last_issued_at_s
    known = row.within_s.get(part if part in row.within_s else ENGINE_DECODE, (0.0, 0.0))
    return row.began_at_s + known[0], row.began_at_s + known[1]


def _slow_within(
    times: RunTimes,
    window: tuple[float, float],
    part: str,
    excess_s: float,
    label: tuple[str, str] | None = None,
) -> Plant:
    """Add to rollouts with this label as much of the excess as the part's extent lies within the window."""
    added: dict[str, float] = {}
    for row in times.rows:
        begin_s, end_s = _extent(row, part)
        inside = max(0.0, min(end_s, window[1]) - max(begin_s, window[0]))
        point = window[0] <= begin_s < window[1] and end_s - begin_s < 1e-9
        if row.finished and (label is None or label[1] in _values(row, label[0])) and (inside or point):
            added[row.rollout_id] = excess_s * (1.0 if point else inside / (end_s - begin_s))
    return replace(_planted(times, added, part, excess_s, window), label=label)


def _stopped(times: RunTimes, chance: random.Random, part: str, excess_s: float) -> Plant:
    """Let everything that works in its agent's phase wait for the end of a stop."""
    begin_s, _ = _window(times, chance, 0.0)
    end_s = begin_s + excess_s
    added = {}
    for row in times.rows:
        first_s, last_s = _extent(row, ENGINE_DECODE)
        if row.finished and first_s < end_s and last_s > begin_s:
            # One that would have begun within the stop begins after it.
            added[row.rollout_id] = end_s - max(begin_s, first_s)
    return _planted(times, added, part, excess_s, (begin_s, end_s))


def _planted(
    times: RunTimes, added: Mapping[str, float], part: str, excess_s: float, window: tuple[float, float]
) -> Plant:
    rows = tuple(
        _longer(row, part, added[row.rollout_id], window) if row.rollout_id in added else row for row in times.rows
    )
    affected = frozenset(rollout for rollout, seconds in added.items() if seconds >= excess_s / 2)
    usual_s = median_total_s(times)
    times = replace(times, rows=rows)
    return Plant(times=times, affected=affected, begin_s=window[0], end_s=window[1], part=part, usual_s=usual_s)


def _longer(row: RolloutTime, part: str, seconds: float, window: tuple[float, float]) -> RolloutTime:
    """Return a rollout of which a part took longer; what follows it moves."""
    within_s = dict(row.within_s)
    if part != DISPATCH and row.began_at_s is not None:
        begin_s, end_s = (at_s - row.began_at_s for at_s in _extent(row, part))
        if part not in within_s:
            begin_s = min(end_s, max(begin_s, window[0] - row.began_at_s))
        within_s = {
            name: (
                (first_s, last_s + seconds)
                if in_order(name) < in_order(part) and last_s > begin_s
                else (first_s + seconds * (first_s >= end_s), last_s + seconds * (last_s > begin_s))
            )
            for name, (first_s, last_s) in within_s.items()
        }
        within_s[part] = begin_s, end_s + seconds
    parts_s = dict(row.parts_s) | {part: row.parts_s.get(part, 0.0) + seconds}
    assert row.ended_at_s is not None
    # The attempt began on its worker when it did: `began_at_s` does not move, but for a late order.
    began_at_s = None if row.began_at_s is None else row.began_at_s + seconds * (part == DISPATCH)
    return replace(
        row,
        total_s=row.total_s + seconds,
        parts_s=parts_s,
        within_s=within_s,
        began_at_s=began_at_s,
        ended_at_s=row.ended_at_s + seconds,
        ready_at_s=None if row.ready_at_s is None else max(row.ready_at_s, row.ended_at_s + seconds),
    )


def median_total_s(times: RunTimes) -> float:
    """Return the median time of a rollout."""
    return float(np.median([row.total_s for row in times.rows if row.finished]))
