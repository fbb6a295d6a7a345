"""Adaptive concurrency: how many rollouts may be in flight, by what engines and outside services can take.

Invariants:
- Additive increase, multiplicative decrease (D.-M. Chiu, R. Jain, Computer Networks 17, 1989): the limit grows by a
  fixed number while it is used and nothing is overloaded, and shrinks by a factor when something is.
- One overload shrinks it once: what was started before has to leave before the next look counts.
- It only ever lowers what the buffer admits: the staleness bound is not its business.
- A latency is told only when enough rollouts ended to mean something: a figure of one or two is noise, and the best of
  much noise is no standard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.actors.record.utilisation import Station, UtilisationMeter

if TYPE_CHECKING:
    from collections.abc import Mapping

ENOUGH_ENDS: Final = 16
"""Rollouts that end in a stretch from which latencies are computed; with fewer it lasts longer."""
STRETCH_S: Final = 10.0
"""Least time of a stretch, and how long its figures stand: one of them shrinks the limit once."""
STRETCHES: Final = 3
"""The median of so many is told: one stretch that stands out is no overload, and none is the best."""
OUTSIDE: Final = (Station.BOOT, Station.EVALUATOR, Station.SIMULATOR)
"""Services outside engines and learner."""


class PacingConfig(BaseModel):
    """Additive increase, multiplicative decrease of the rollouts in flight."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    """Off: slots and inventory alone decide how many rollouts run."""
    start: int = Field(default=32, ge=1)
    """Rollouts in flight to begin with."""
    least: int = Field(default=8, ge=1)
    """Never fewer."""
    increase: int = Field(default=4, ge=1)
    """Added each `interval_s` while the limit is reached and nothing is overloaded."""
    decrease: float = Field(default=0.7, gt=0, lt=1)
    """Factor at an overload."""
    interval_s: float = Field(default=10.0, gt=0)
    """Between two changes; several turns should fit in."""
    engine_queue: float = Field(default=1.25, gt=0)
    """Turns at the engines over what they decode at once: more is an overload."""
    latency_ratio: float = Field(default=3.0, gt=1)
    """Mean time at an outside service (boots, evaluations, user simulator) over the best one seen: more is an
    overload."""

    @model_validator(mode="after")
    def _ordered(self) -> PacingConfig:
        if self.start < self.least:
            raise ValueError(f"start = {self.start} is below least = {self.least}: raise the first or lower the second")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """One look. `engine_queue`: turns at the engines over what they decode at once; `latencies_s`: mean seconds by
    outside service, over the last stretches; what was not measured is left out."""

    engine_queue: float | None = None
    latencies_s: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class LatencyWatch:
    """Mean seconds that a rollout spends at each outside service, by Little's law."""

    latencies_s: tuple[tuple[str, float], ...] = ()
    """By service, of the stretches that ended last; empty when the newest ended more than `STRETCH_S` ago."""
    _meter: UtilisationMeter = field(default_factory=UtilisationMeter)
    _figures: dict[Station, deque[float]] = field(default_factory=dict)

    def sample(self, now_s: float, in_use: Mapping[Station, float], finished: int) -> None:
        """What is in the stations now, and how many rollouts have finished so far."""
        self._meter.sample(now_s, in_use, finished)
        if self._meter.seconds < STRETCH_S:
            return
        self.latencies_s = ()
        if self._meter.ended >= ENOUGH_ENDS:
            self.latencies_s = tuple(self._ends_stretch())
            self._meter.reset()

    def _ends_stretch(self) -> list[tuple[str, float]]:
        told = []
        for load in self._meter.loads({}):
            # A service in which nothing was seen was not measured.
            if load.station in OUTSIDE and load.mean_s:
                figures = self._figures.setdefault(load.station, deque(maxlen=STRETCHES))
                figures.append(load.mean_s)
                told.append((load.station.value, median(figures)))
        return told


class AdaptiveLimit:
    """The limit of one dispatcher. `now_s` is any clock in seconds; `most` the slots there are."""

    def __init__(self, config: PacingConfig, most: int, now_s: float) -> None:
        self._config, self._most = config, most
        self.limit = min(config.start, most) if config.enabled else most
        self.reason = ""
        """Why it shrank last; for people."""
        self._changed_s = now_s
        self._best_s: dict[str, float] = {}

    def look(self, pressure: Pressure, in_flight: int, now_s: float) -> int:
        """The limit after one look at the load."""
        reason = self._overload(pressure)
        if not self._config.enabled or now_s - self._changed_s < self._config.interval_s:
            return self.limit
        if reason:
            least = min(self._config.least, self._most)
            self.limit, self.reason = max(least, int(self.limit * self._config.decrease)), reason
            self._changed_s = now_s
        elif in_flight >= self.limit:
            self.limit = min(self._most, self.limit + self._config.increase)
            self._changed_s = now_s
        return self.limit

    def _overload(self, pressure: Pressure) -> str:
        """What is overloaded, empty when nothing is; remembers the best latencies."""
        reasons = []
        if pressure.engine_queue is not None and pressure.engine_queue > self._config.engine_queue:
            reasons.append(f"engines have {pressure.engine_queue:.2f} times the turns they decode at once")
        for service, seconds in pressure.latencies_s:
            if seconds <= 0:
                continue
            best = self._best_s[service] = min(seconds, self._best_s.get(service, seconds))
            if seconds > self._config.latency_ratio * best:
                reasons.append(f"{service} takes {seconds:.3g} s, at best {best:.3g} s")
        return "; ".join(reasons)
