"""How busy each station of a run is, by Little's law, and which one holds the others up.

Invariants:
- In a station are, on average, as many rollouts as arrive in a second times the seconds each stays (`L = lambda W`,
  J. D. C. Little, Operations Research 9(3), 1961): how many are in it and how many leave the run in a second are
  measured, the time a rollout spends there follows.
- A station that is full, or without a known size and with nearly all rollouts in it, is the one to look at: making any
  other one faster changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BUSY = 0.9
"""A station used this much is full: what fluctuates cannot be used to the last place."""


class Station(StrEnum):
    """Where a rollout can be held up."""

    QUEUE = "queue"
    """Waiting for a place in the sandbox pool; has no size of its own: a queue tells of what is behind it."""
    BOOT = "boot"
    """Boots of sandboxes."""
    SANDBOX = "sandbox"
    """Places of the pool: agents' and evaluators' sandboxes, from boot to release."""
    ENGINE = "engine"
    """Turns at the engines."""
    SIMULATOR = "simulator"
    """The simulated user that an agent talks to, and other services outside the run."""
    EVALUATOR = "evaluator"
    """Evaluations, their sandboxes' boots too."""
    LEARNER = "learner"
    """The one learner: everything but waiting for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StationLoad:
    """Over one stretch of time. `in_use`: mean number of rollouts (turns, sandboxes) in the station; `capacity`: how
    many it takes, None where nothing limits it; `mean_s`: seconds one rollout spends there, None while none ended."""

    station: Station
    in_use: float
    capacity: float | None
    mean_s: float | None

    @property
    def utilisation(self) -> float | None:
        """Share of the station's places in use; None without a size."""
        return None if self.capacity is None else self.in_use / self.capacity

    def line(self) -> str:
        """For a person: `sandbox 97% of 64, 9.9 s a rollout`."""
        used = f"{self.in_use:.1f} in it" if self.capacity is None else f"{self.utilisation:.0%} of {self.capacity:g}"
        return f"{self.station} {used}" + ("" if self.mean_s is None else f", {self.mean_s:.3g} s a rollout")


def mean_loads(records: Iterable[Mapping[str, Any]]) -> tuple[StationLoad, ...]:
    """The loads over several `stations` records of the metrics, weighted with their seconds; `mean_s` over those that
    have it."""
    told = [(Station(name), load, record["seconds"]) for record in records for name, load in record["stations"].items()]
    sizes = {station: load["capacity"] for station, load, _ in told}
    return tuple(
        StationLoad(
            station=station,
            in_use=_mean((load["in_use"], seconds) for name, load, seconds in told if name is station) or 0.0,
            capacity=sizes[station],
            mean_s=_mean((load["mean_s"], seconds) for name, load, seconds in told if name is station),
        )
        for station in Station
        if station in sizes
    )


def mean_in_flight(records: Iterable[Mapping[str, Any]]) -> float:
    """Rollouts in flight over several `stations` records, weighted with their seconds; 0 where none tells them."""
    return _mean((record.get("in_flight"), record["seconds"]) for record in records) or 0.0


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """Of pairs of value and weight, those without a value left out; None without any."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def bottleneck(loads: Iterable[StationLoad], in_flight: float) -> StationLoad | None:
    """The station that holds the run up, None when none does.

    The fullest of those that are full; else one without a size, outside the run's own sandboxes and queue, that holds
    nearly all rollouts in flight (mean number): a phase lock, as when one slow service answers one call at a time.
    """
    known = list(loads)
    full = [load for load in known if (load.utilisation or 0.0) >= BUSY]
    if full:
        return max(full, key=lambda load: load.utilisation or 0.0)
    unsized = [load for load in known if load.capacity is None and load.station is not Station.QUEUE]
    locked = [load for load in unsized if in_flight > 0 and load.in_use >= BUSY * in_flight]
    return max(locked, key=lambda load: load.in_use, default=None)


@dataclass(slots=True)
class UtilisationMeter:
    """Means of what is in each station, over samples weighted with the time since the one before."""

    _weighted: dict[Station, float] = field(default_factory=dict)
    _in_flight: float = 0.0
    _seconds: float = 0.0
    _last_s: float | None = None
    _finished: int | None = None
    _ended: int = 0

    def sample(self, now_s: float, in_use: Mapping[Station, float], finished: int, *, in_flight: float = 0.0) -> None:
        """What is in the stations now, how many rollouts have finished so far, and how many are in flight now. A count
        of finished ones that fell began anew."""
        if self._last_s is not None and self._finished is not None:
            elapsed_s = max(0.0, now_s - self._last_s)
            self._seconds += elapsed_s
            self._ended += max(0, finished - self._finished)
            self._in_flight += in_flight * elapsed_s
            for station, number in in_use.items():
                self._weighted[station] = self._weighted.get(station, 0.0) + number * elapsed_s
        self._last_s, self._finished = now_s, finished

    @property
    def seconds(self) -> float:
        """How long it has measured."""
        return self._seconds

    @property
    def ended(self) -> int:
        """How many rollouts have finished meanwhile."""
        return self._ended

    @property
    def in_flight(self) -> float:
        """Mean number of rollouts in flight; 0 before the second sample."""
        return self._in_flight / self._seconds if self._seconds else 0.0

    def loads(self, capacities: Mapping[Station, float]) -> tuple[StationLoad, ...]:
        """The loads since the last `reset`, in the order of `Station`; nothing before the second sample."""
        if not self._seconds:
            return ()
        return tuple(
            StationLoad(
                station=station,
                in_use=self._weighted[station] / self._seconds,
                capacity=capacities.get(station),
                mean_s=self._weighted[station] / self._ended if self._ended else None,
            )
            for station in Station
            if station in self._weighted
        )

    def reset(self) -> None:
        """Begin a new stretch at the last sample."""
        self._weighted.clear()
        self._seconds, self._in_flight, self._ended = 0.0, 0.0, 0
