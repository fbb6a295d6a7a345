"""The adaptive limit on rollouts in flight, driven by the load on engines and outside services.

Invariants:
- Additive increase, multiplicative decrease (D.-M. Chiu, R. Jain, Computer Networks 17, 1989): the limit grows by a
  fixed amount while it is reached and nothing is overloaded, and is multiplied by a factor below 1 when something is
  overloaded.
- One overload lowers the limit only once: the next measurement counts only after `interval_s`, once older rollouts have
  ended.
- The limit can only reduce what the buffer admits, so it does not affect the staleness bound.
- A latency is reported only if enough rollouts have ended: the mean of one or two is noise, and the minimum of noisy
  values is not a baseline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from headrace.actors.record.files.utilisation import Station, UtilisationMeter

ENOUGH_ENDS: Final = 16
"""Number of rollouts that must end in a window before latencies are computed; with fewer, the window is extended."""
WINDOW_S: Final = 10.0
"""Minimum length of a window. Its values expire after the same time, so that each can lower the limit only once."""
WINDOWS: Final = 3
"""Number of windows over which the median is taken, so that a single outlier becomes neither an overload nor the
baseline."""
OUTSIDE: Final = (Station.BOOT, Station.EVALUATOR, Station.SIMULATOR)
"""Services other than the engines and the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingConfig:
    """Control of the number of rollouts in flight by additive increase and multiplicative decrease."""

    enabled: bool = False
    """Whether to enable pacing; without it, only slots and inventory limit the number of rollouts."""
    start: int = 32
    """Initial limit on rollouts in flight."""
    least: int = 8
    """Lower bound of the limit."""
    increase: int = 4
    """Increment of the limit per `interval_s` while it is reached and nothing is overloaded."""
    decrease: float = 0.7
    """Factor by which the limit is multiplied on an overload."""
    interval_s: float = 10.0
    """Minimum time between two changes; it should cover several turns."""
    engine_queue: float = 1.25
    """Threshold for the number of turns at the engines, relative to the number that they decode at once; above it the
    engines count as overloaded."""
    latency_ratio: float = 3.0
    """Threshold for the mean time at an outside service (boots, evaluations, user simulator), relative to the best one
    measured; above it the service counts as overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """One load measurement. `engine_queue` is the number of turns at the engines, relative to the number that they
    decode at once. `latencies_s` has the mean seconds per outside service over the last windows; services that were not
    measured are absent."""

    engine_queue: float | None = None
    latencies_s: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class LatencyWatch:
    """Estimator of the mean seconds that a rollout spends at each outside service, using Little's law."""

    latencies_s: tuple[tuple[str, float], ...] = ()
    """Medians per service over the last windows; empty once the newest window is older than `WINDOW_S`."""
    _meter: UtilisationMeter = field(default_factory=UtilisationMeter)
    _means_s: dict[str, deque[float]] = field(default_factory=dict)

    def sample(self, now_s: float, in_use: Mapping[str, float], finished: int) -> None:
        """Add a sample: the number of rollouts at each station now, and the number finished so far."""
        self._meter.sample(now_s, in_use, finished)
        if self._meter.seconds < WINDOW_S:
            return
        self.latencies_s = ()
        if self._meter.ended >= ENOUGH_ENDS:
            latencies_s = []
            for load in self._meter.loads({}):
                # A service without any rollout was not measured.
                if load.station in OUTSIDE and load.mean_s:
                    means_s = self._means_s.setdefault(load.station, deque(maxlen=WINDOWS))
                    means_s.append(load.mean_s)
                    latencies_s.append((str(load.station), median(means_s)))
            self.latencies_s = tuple(latencies_s)
            self._meter.reset()


class AdaptiveLimit:
    """Rollout limit of one dispatcher. `now_s` is any clock in seconds; `most` is the number of slots."""

    def __init__(self, config: PacingConfig, most: int, now_s: float) -> None:
        self._config, self._most = config, most
        self.limit = min(config.start, most) if config.enabled else most
        self.reason = ""
        """Human-readable reason for the last decrease."""
        self._changed_s = now_s
        self._best_s: dict[str, float] = {}

    def look(self, pressure: Pressure, in_flight: int, now_s: float) -> int:
        """Update the limit from one load measurement, and return it."""
        reasons = []
        if pressure.engine_queue is not None and pressure.engine_queue > self._config.engine_queue:
            reasons.append(f"engines have {pressure.engine_queue:.2f} times as many turns as they can decode at once")
        for service, seconds in pressure.latencies_s:
            if seconds > 0:
                best = self._best_s[service] = min(seconds, self._best_s.get(service, seconds))
                if seconds > self._config.latency_ratio * best:
                    reasons.append(f"{service} takes {seconds:.3g} s, at best {best:.3g} s")
        if not self._config.enabled or now_s - self._changed_s < self._config.interval_s:
            return self.limit
        if reasons:
            least = min(self._config.least, self._most)
            self.limit, self.reason = max(least, int(self.limit * self._config.decrease)), "; ".join(reasons)
            self._changed_s = now_s
        elif in_flight >= self.limit:
            self.limit = min(self._most, self.limit + self._config.increase)
            self._changed_s = now_s
        return self.limit
