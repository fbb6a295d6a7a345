"""Registry of a group's engines: their states, and the circuit breakers of their slots. The registry is pure: it has no
clock and does no I/O; `now` is in monotonic seconds.

Invariants:
- Every state change is one of `MOVES`; an engine that is gone never returns under the same name.
- Two live engines never share an address or a slot (`place`).
- Requests are routed only to serving engines, which hold weights from a push or a verified recovery.
- A failure counts against the engine's slot: after repeated failures the next attempt waits (`breaker`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from headrace.actors.errors import EngineAddressTaken, EngineUnknown
from headrace.buffer.primitives.circuit_breaker import CircuitBreaker
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable

REMEMBERED = 16
"""Number of engines that are gone but still listed."""


class EngineState(StrEnum):
    """State of an engine."""

    STARTING = "starting"
    """Has not answered yet."""
    WAITING = "waiting"
    """Answers but lacks the newest weights: no traffic."""
    SERVING = "serving"
    """Gets traffic."""
    QUARANTINED = "quarantined"
    """Failed a push or hung: no traffic until it is replaced or holds new, verified weights."""
    LEAVING = "leaving"
    """No new traffic; its requests finish, or continue on another engine."""
    GONE = "gone"
    """Stopped, dead or removed."""


class Origin(StrEnum):
    """Origin of an engine, which determines whether the group may kill it."""

    LOCAL = "local"
    """A process of the group; killed and replaced when it fails."""
    RAY = "ray"
    """A process behind a Ray actor; killed and replaced when it fails."""
    ATTACHED = "attached"
    """An attached server: never killed, but taken out of routing while it is failing."""
    ROUTER = "router"
    """Treated like an attached server for as long as the router lists it."""

    @property
    def is_ours(self) -> bool:
        return self in (Origin.LOCAL, Origin.RAY)


LIVING = frozenset(EngineState) - {EngineState.GONE}
MOVES: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset(
        {EngineState.WAITING, EngineState.QUARANTINED, EngineState.LEAVING, EngineState.GONE}
    ),
    EngineState.WAITING: LIVING - {EngineState.STARTING} | {EngineState.GONE},
    EngineState.SERVING: LIVING - {EngineState.STARTING} | {EngineState.GONE},
    EngineState.QUARANTINED: LIVING - {EngineState.STARTING} | {EngineState.GONE},
    EngineState.LEAVING: frozenset({EngineState.LEAVING, EngineState.GONE}),
    EngineState.GONE: frozenset(),
}


def new_breaker() -> CircuitBreaker:
    """Return a slot's circuit breaker; it opens after three failures in five minutes, initially for 10 s."""
    return CircuitBreaker(3, 10.0, longest_open_s=300.0, window_s=300.0)


@dataclass(slots=True, kw_only=True)
class EngineEntry:
    """State of one engine. An engine and its replacements share a `place`. `reason` explains why it is not serving;
    `misses` counts consecutive health checks without an answer; `answers` is False from a failure until it answers
    again. `cache_namespace` is sent with the engine's requests; it is the engine's version if pushes are in place."""

    engine_id: EngineId
    place: str
    origin: Origin
    url: str = ""
    state: EngineState = EngineState.STARTING
    version: PolicyVersion | None = None
    misses: int = 0
    answers: bool = True
    reason: str = ""
    cache_namespace: str | None = None


@dataclass(slots=True)
class EngineRegistry:
    """Engines of one group, by name."""

    _entries: dict[EngineId, EngineEntry] = field(default_factory=dict)
    _breakers: dict[str, CircuitBreaker] = field(default_factory=dict)

    def starting(self, engine_id: EngineId, *, place: str, origin: Origin, now: float, url: str = "") -> EngineEntry:
        """Add an engine that is being started or attached. Raises EngineAddressTaken, or ValueError if the name or the
        slot is taken."""
        if self.stands(engine_id, *LIVING):
            raise ValueError(f"there is already an engine {engine_id}")
        if any(entry.place == place for entry in self.living()):
            raise ValueError(f"there is already an engine at {place}")
        if url:
            self._refuse_taken(engine_id, url)
        self._entries.pop(engine_id, None)
        entry = self._entries[engine_id] = EngineEntry(engine_id=engine_id, place=place, origin=origin, url=url)
        self.breaker(place).begin(now)
        gone = [known.engine_id for known in self._entries.values() if known.state is EngineState.GONE]
        for oldest in gone[:-REMEMBERED]:
            del self._entries[oldest]
        return entry

    def answered(self, engine_id: EngineId, *, url: str, version: PolicyVersion | None) -> None:
        """Record that the engine has answered and is waiting for the newest weights. Raises EngineAddressTaken."""
        self._refuse_taken(engine_id, url)
        entry = self._move(engine_id, EngineState.WAITING, "it waits for weights")
        entry.url, entry.version, entry.misses = url, version, 0

    def serves(self, engine_id: EngineId, version: PolicyVersion) -> None:
        """Record that the engine holds all of these weights and gets traffic. Raises ValueError for an engine that has
        never answered."""
        if not self[engine_id].url:
            raise ValueError(f"{engine_id} cannot serve: it has no address because it never answered")
        entry = self._move(engine_id, EngineState.SERVING, "")
        entry.version, entry.misses = version, 0
        self.breaker(entry.place).succeeded()

    def opened(self, engine_id: EngineId, cache_namespace: str | None) -> None:
        """Record the cache namespace that is sent with the engine's requests from now on."""
        self[engine_id].cache_namespace = cache_namespace

    def left_behind(self, engine_id: EngineId) -> None:
        """Record that a push did not reach the engine, although it is healthy."""
        self._move(engine_id, EngineState.WAITING, "a push ended before its turn")

    def trying(self, engine_id: EngineId, now: float) -> None:
        """Record that a push to a quarantined engine is beginning."""
        self.breaker(self[engine_id].place).begin(now)

    def quarantine(self, engine_id: EngineId, reason: str, now: float) -> None:
        """Record a failure of the engine."""
        entry = self._move(engine_id, EngineState.QUARANTINED, reason)
        entry.answers = False
        self.breaker(entry.place).failed(now)

    def suspect(self, engine_id: EngineId, reason: str) -> None:
        """Record that the engine's weights are unknown through no fault of its own; its breaker does not count this."""
        self._move(engine_id, EngineState.QUARANTINED, reason)

    def missed(self, engine_id: EngineId) -> int:
        """Record an unanswered health check, and return the number of consecutive ones."""
        entry = self[engine_id]
        entry.misses, entry.answers = entry.misses + 1, False
        return entry.misses

    def heard(self, engine_id: EngineId) -> None:
        entry = self[engine_id]
        entry.misses, entry.answers = 0, True

    def leaving(self, engine_id: EngineId) -> None:
        self._move(engine_id, EngineState.LEAVING, "it is being removed")

    def gone(self, engine_id: EngineId, reason: str) -> None:
        """Record that an engine is gone; `quarantine` or `failed` has already recorded its failures."""
        self._move(engine_id, EngineState.GONE, reason)

    def failed(self, engine_id: EngineId, reason: str, now: float) -> None:
        """Record that the engine died or did not start."""
        entry = self._move(engine_id, EngineState.GONE, reason)
        self.breaker(entry.place).failed(now)

    def __getitem__(self, engine_id: EngineId) -> EngineEntry:
        """Return the engine's entry. Raises EngineUnknown."""
        entry = self._entries.get(engine_id)
        if entry is None:
            raise EngineUnknown(f"there is no engine {engine_id}: `headrace status RUN --engines` lists them")
        return entry

    def stands(self, engine_id: EngineId, *states: EngineState) -> bool:
        """Return True if there is an engine with that name in one of these states. Callers that have awaited something
        check this before they change the state."""
        entry = self._entries.get(engine_id)
        return entry is not None and entry.state in states

    def all(self) -> tuple[EngineEntry, ...]:
        """Return all engines, including those that are gone but still remembered."""
        return tuple(self._entries.values())

    def living(self) -> tuple[EngineEntry, ...]:
        return tuple(entry for entry in self._entries.values() if entry.state in LIVING)

    def in_state(self, *states: EngineState) -> tuple[EngineEntry, ...]:
        return tuple(entry for entry in self._entries.values() if entry.state in states)

    def at(self, url: str) -> EngineEntry | None:
        """Return the live engine at this address, if any."""
        return next((entry for entry in self.living() if entry.url and address(entry.url) == address(url)), None)

    def breaker(self, place: str) -> CircuitBreaker:
        return self._breakers.setdefault(place, new_breaker())

    def may_try(self, place: str, now: float) -> bool:
        """Return True if an engine may be started, or pushed to, in this slot now."""
        return self.breaker(place).allows(now)

    def due(self, now: float, *, at_once: bool = False) -> tuple[EngineEntry, ...]:
        """Return the engines that need the newest weights: those that are waiting, and quarantined attached engines
        that are answering again. Engines whose slot has an open breaker are left out, unless `at_once`."""
        waiting = self.in_state(EngineState.WAITING)
        recovered = (
            entry for entry in self.in_state(EngineState.QUARANTINED) if entry.answers and not entry.origin.is_ours
        )
        return tuple(entry for entry in (*waiting, *recovered) if at_once or self.may_try(entry.place, now))

    def table(self, version: int) -> RoutingTable:
        """Return the routing table of all engines that have answered. Those that are not serving are listed as not
        admitted, so that requests running on them can finish."""
        shown = self.in_state(EngineState.WAITING, EngineState.SERVING, EngineState.QUARANTINED, EngineState.LEAVING)
        return RoutingTable(
            version=version,
            engines=tuple(
                EngineRoute(
                    engine_id=entry.engine_id,
                    url=entry.url,
                    admitted=entry.state is EngineState.SERVING,
                    cache_namespace=entry.cache_namespace,
                    attached=not entry.origin.is_ours,
                )
                for entry in shown
                if entry.url
            ),
        )

    def _move(self, engine_id: EngineId, state: EngineState, reason: str) -> EngineEntry:
        entry = self[engine_id]
        if state not in MOVES[entry.state]:
            raise ValueError(f"{engine_id} is {entry.state} and cannot become {state}")
        entry.state, entry.reason = state, reason
        return entry

    def _refuse_taken(self, engine_id: EngineId, url: str) -> None:
        other = self.at(url)
        if other is not None and other.engine_id != engine_id:
            raise EngineAddressTaken(
                f"{engine_id} and {other.engine_id} have the same address, {url}: remove one of them"
            )


def address(url: str) -> tuple[str, int]:
    """Return the host and port, normalized so that equal addresses compare equal."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("127.0.0.1" if host == "localhost" else host), port
