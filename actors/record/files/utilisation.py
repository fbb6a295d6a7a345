"""Utilisation of a run's stations by Little's law, and the station that limits the run's throughput.

Invariants:
- The mean number of rollouts in a station is their arrival rate times the time each of them spends there (`L = lambda
  W`, J. D. C. Little, Operations Research 9(3), 1961). The number in the station and the rate at which rollouts leave
  the run are measured; the time that a rollout spends there follows from them.
- The bottleneck is a station that is full, or one without a known capacity that holds nearly all rollouts: making any
  other station faster changes nothing. Rollouts wait for services inside their sandboxes, so full sandboxes are no
  bottleneck while most rollouts are in one service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

SERVICE: Final = "service."
"""Beginning of the names of the stations of services (`[services.NAME]`), which the recipe names."""
MOST: Final = 0.5
"""Share of the rollouts in flight above which a service holds most of them."""
BUSY = 0.9
"""Share of its capacity above which a station counts as full: a fluctuating load never fills every slot."""


class Station(StrEnum):
    """Station of a run at which rollouts can wait."""

    QUEUE = "queue"
    """Waiting for a slot in the sandbox pool; a queue has no capacity of its own and reflects the next station."""
    BOOT = "boot"
    """Sandboxes that are booting."""
    SANDBOX = "sandbox"
    """Slots of the pool: agents' and evaluators' sandboxes, from boot to release."""
    ENGINE = "engine"
    """Turns that the engines are generating."""
    SIMULATOR = "simulator"
    """Simulated users and other services outside the run."""
    EVALUATOR = "evaluator"
    """Evaluations, including the boots of their sandboxes."""
    LEARNER = "learner"
    """The learner, except while it is waiting for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StationLoad:
    """Load of one station over a period.

    `in_use` is the mean number of rollouts (turns, sandboxes) in the station. `capacity` is the maximum number, None
    when nothing limits it. `mean_s` is the mean number of seconds that a rollout spends there, None while none has
    ended. `station` is a Station, or `SERVICE` and the name of a service. Rollouts that wait for a slot of a service
    are in it too, so that more can be in use than its capacity.
    """

    station: Station | str
    in_use: float
    capacity: float | None
    mean_s: float | None

    @property
    def utilisation(self) -> float | None:
        """Share of the capacity in use; None without a capacity."""
        return None if self.capacity is None else self.in_use / self.capacity

    def line(self) -> str:
        """Return the load as text, such as `sandbox 97% of 64, 9.9 s a rollout`."""
        used = f"{self.in_use:.1f} in use" if self.capacity is None else f"{self.utilisation:.0%} of {self.capacity:g}"
        return f"{self.station} {used}" + ("" if self.mean_s is None else f", {self.mean_s:.3g} s a rollout")


def mean_loads(records: Iterable[Mapping[str, Any]]) -> tuple[StationLoad, ...]:
    """Return the mean loads over several `stations` records of the metrics, weighted by their seconds; records without
    a value are ignored for `mean_s`."""
    known = [(name, load, record["seconds"]) for record in records for name, load in record["stations"].items()]
    sizes = {name: load["capacity"] for name, load, _ in known}
    for service in (name for name in sizes if name.startswith(SERVICE)):
        # Its limit changes, unlike the capacities of the other stations.
        sizes[service] = _mean((load["capacity"], seconds) for name, load, seconds in known if name == service)
    return tuple(
        StationLoad(
            station=station,
            in_use=_mean((load["in_use"], seconds) for name, load, seconds in known if name == station) or 0.0,
            capacity=sizes[station],
            mean_s=_mean((load["mean_s"], seconds) for name, load, seconds in known if name == station),
        )
        for station in in_order(sizes)
    )


def in_order(names: Collection[str]) -> Iterator[Station | str]:
    """Yield the stations with these names: those of every run, in the order of `Station`, then its services."""
    yield from (station for station in Station if station in names)
    yield from sorted(name for name in names if name.startswith(SERVICE))


def mean_in_flight(records: Iterable[Mapping[str, Any]]) -> float:
    """Return the mean number of rollouts in flight over several `stations` records, weighted by their seconds; 0 when
    no record has it."""
    return _mean((record.get("in_flight"), record["seconds"]) for record in records) or 0.0


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of (value, weight) pairs, leaving out values of None; None when there is none."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def bottleneck(loads: Iterable[StationLoad], in_flight: float) -> StationLoad | None:
    """Return the station that limits the throughput of the run, or None if no station does.

    This is the fullest of the full stations. When none is full but the sandboxes, it is a service that holds most of
    the rollouts in flight (mean number). Otherwise it is a station without a capacity, other than the queue, that holds
    nearly all of them: a phase lock, as when a slow service answers one call at a time.
    """
    known = list(loads)
    full = [load for load in known if (load.utilisation or 0.0) >= BUSY]
    services = [load for load in known if load.station.startswith(SERVICE)]
    holding = [load for load in services if in_flight > 0 and load.in_use >= MOST * in_flight]
    if holding:
        full = [load for load in full if load.station != Station.SANDBOX]
    if full:
        return max(full, key=lambda load: load.utilisation or 0.0)
    if holding:
        return max(holding, key=lambda load: load.in_use)
    unsized = [load for load in known if load.capacity is None and load.station is not Station.QUEUE]
    locked = [load for load in unsized if in_flight > 0 and load.in_use >= BUSY * in_flight]
    return max(locked, key=lambda load: load.in_use, default=None)


def service_shares(loads: Iterable[StationLoad], in_flight: float) -> dict[str, float]:
    """Return the share of the rollouts' time in each service, by name: by Little's law, that of the rollouts in flight
    that are in it. Empty without any rollout."""
    return {
        load.station.removeprefix(SERVICE): load.in_use / in_flight
        for load in loads
        if load.station.startswith(SERVICE) and in_flight > 0
    }


@dataclass(slots=True)
class UtilisationMeter:
    """Mean load of each station over samples, weighted by the time since the previous sample."""

    _weighted: dict[str, float] = field(default_factory=dict)
    _in_flight: float = 0.0
    _seconds: float = 0.0
    _last_s: float | None = None
    _finished: int | None = None
    _ended: int = 0

    def sample(self, now_s: float, in_use: Mapping[str, float], finished: int, *, in_flight: float = 0.0) -> None:
        """Record how many rollouts are in each station, how many are in flight, and how many have finished so far. If
        the count of finished rollouts falls, its source has been restarted, and nothing is added."""
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
        """Seconds measured since the last `reset`."""
        return self._seconds

    @property
    def ended(self) -> int:
        """Number of rollouts that finished in the measured time."""
        return self._ended

    @property
    def in_flight(self) -> float:
        """Mean number of rollouts in flight in the measured time; 0 before the second sample."""
        return self._in_flight / self._seconds if self._seconds else 0.0

    def loads(self, capacities: Mapping[str, float]) -> tuple[StationLoad, ...]:
        """Return the loads since the last `reset`, in the order of `in_order`; empty before the second sample."""
        if not self._seconds:
            return ()
        return tuple(
            StationLoad(
                station=station,
                in_use=self._weighted[station] / self._seconds,
                capacity=capacities.get(station),
                mean_s=self._weighted[station] / self._ended if self._ended else None,
            )
            for station in in_order(self._weighted)
        )

    def reset(self) -> None:
        """Start a new period at the last sample."""
        self._weighted.clear()
        self._seconds, self._in_flight, self._ended = 0.0, 0.0, 0
