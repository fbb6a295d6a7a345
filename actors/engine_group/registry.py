"""Which engines there are, what state each is in, and who may be tried again. Pure: no clock, no I/O; `now` is
monotonic seconds.

Invariants:
- Every change of state is one of `MOVES`; what is gone stays gone under its name.
- Two engines that live have two addresses, and two places.
- Only an engine that serves is routed to, and it holds weights that a push or a verified recovery gave it.
- A failure counts against the engine's place: where engines fail again and again, the next try waits (`breaker`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.actors.engine_group.errors import EngineAddressTaken, EngineUnknown
from headrace.buffer.primitives.circuit_breaker import BreakerState, CircuitBreaker
from headrace.serve.gateway.routing import EngineRoute, RoutingTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.engine import EngineId

REMEMBERED = 16
"""How many engines that are gone are still told of."""


class EngineState(StrEnum):
    """Where an engine stands."""

    STARTING = "starting"
    """It has not answered yet."""
    WAITING = "waiting"
    """It answers, and lacks the newest weights: no traffic."""
    SERVING = "serving"
    """It gets traffic."""
    QUARANTINED = "quarantined"
    """It failed a push, or hangs: no traffic until it is replaced, or caught up and verified."""
    LEAVING = "leaving"
    """No new traffic; what runs ends, or goes on elsewhere."""
    GONE = "gone"
    """Stopped, dead or let go."""


class Origin(StrEnum):
    """Where an engine comes from, and so what may be done with it."""

    LOCAL = "local"
    """A process of the group; killed and replaced when it fails."""
    RAY = "ray"
    """A process behind an actor of its own; killed and replaced too."""
    ATTACHED = "attached"
    """Somebody else's server: never killed, taken out of routing while it fails."""
    ROUTER = "router"
    """The same, as long as the router names it."""

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
    """Return the breaker of a place: it opens after three failures in five minutes, for 10 s at first."""
    return CircuitBreaker(3, 10.0, longest_open_s=300.0, window_s=300.0)


@dataclass(slots=True, kw_only=True)
class EngineEntry:
    """One engine. `place` is what outlives it: engines that replace one another share it. `reason` tells why it does
    not serve; `misses` counts health checks in a row without an answer; `answers` is false from a failure until it
    answers again. `cache_namespace` goes with its requests: its version, where pushes come in place."""

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
    """All engines of a group."""

    _entries: dict[EngineId, EngineEntry] = field(default_factory=dict)
    _breakers: dict[str, CircuitBreaker] = field(default_factory=dict)

    def starting(self, engine_id: EngineId, *, place: str, origin: Origin, now: float, url: str = "") -> EngineEntry:
        """A new engine, which is being started or asked. Raises EngineAddressTaken, ValueError for a name or a place
        that is taken."""
        if self._entries.get(engine_id, None) is not None and self._entries[engine_id].state in LIVING:
            raise ValueError(f"{engine_id} is there already")
        if any(entry.place == place for entry in self.living()):
            raise ValueError(f"there is an engine at {place} already")
        if url:
            self._refuse_taken(engine_id, url)
        self._entries.pop(engine_id, None)
        entry = self._entries[engine_id] = EngineEntry(engine_id=engine_id, place=place, origin=origin, url=url)
        self.breaker(place).begin(now)
        self._forget_the_oldest()
        return entry

    def answered(self, engine_id: EngineId, *, url: str, version: PolicyVersion | None) -> None:
        """It is there, and waits for the newest weights. Raises EngineAddressTaken."""
        self._refuse_taken(engine_id, url)
        entry = self._move(engine_id, EngineState.WAITING, "it waits for weights")
        entry.url, entry.version, entry.misses = url, version, 0

    def serves(self, engine_id: EngineId, version: PolicyVersion) -> None:
        """It holds these weights whole and gets traffic. Raises ValueError for one that never answered."""
        if not self[engine_id].url:
            raise ValueError(f"{engine_id} has no address: it cannot serve")
        entry = self._move(engine_id, EngineState.SERVING, "")
        entry.version, entry.misses = version, 0
        self.breaker(entry.place).succeeded()

    def opened(self, engine_id: EngineId, cache_namespace: str | None) -> None:
        """Its gate was opened: this goes with its requests from now on."""
        self[engine_id].cache_namespace = cache_namespace

    def left_behind(self, engine_id: EngineId) -> None:
        """It is well, and a push did not reach it."""
        self._move(engine_id, EngineState.WAITING, "a push ended before its turn")

    def trying(self, engine_id: EngineId, now: float) -> None:
        """It is about to be caught up."""
        self.breaker(self[engine_id].place).begin(now)

    def quarantine(self, engine_id: EngineId, reason: str, now: float) -> None:
        """It failed."""
        entry = self._move(engine_id, EngineState.QUARANTINED, reason)
        entry.answers = False
        self.breaker(entry.place).failed(now)

    def suspect(self, engine_id: EngineId, reason: str) -> None:
        """Nobody knows what it holds, by no fault of its own."""
        self._move(engine_id, EngineState.QUARANTINED, reason)

    def missed(self, engine_id: EngineId) -> int:
        """A health check got no answer; how many in a row."""
        entry = self[engine_id]
        entry.misses, entry.answers = entry.misses + 1, False
        return entry.misses

    def heard(self, engine_id: EngineId) -> None:
        entry = self[engine_id]
        entry.misses, entry.answers = 0, True

    def leaving(self, engine_id: EngineId) -> None:
        self._move(engine_id, EngineState.LEAVING, "it was told to leave")

    def gone(self, engine_id: EngineId, reason: str) -> None:
        """It is no more. What it did wrong was said before, by `quarantine` or `failed`."""
        self._move(engine_id, EngineState.GONE, reason)

    def failed(self, engine_id: EngineId, reason: str, now: float) -> None:
        """It died, or did not start."""
        entry = self._move(engine_id, EngineState.GONE, reason)
        self.breaker(entry.place).failed(now)

    def __getitem__(self, engine_id: EngineId) -> EngineEntry:
        """Raises EngineUnknown."""
        entry = self._entries.get(engine_id)
        if entry is None:
            raise EngineUnknown(f"there is no engine {engine_id}; `headrace engine list` names those of a run")
        return entry

    def stands(self, engine_id: EngineId, *states: EngineState) -> bool:
        """Whether there is an engine of that name, in one of these states: who waited asks before a change."""
        entry = self._entries.get(engine_id)
        return entry is not None and entry.state in states

    def all(self) -> tuple[EngineEntry, ...]:
        """Those that are gone too."""
        return tuple(self._entries.values())

    def living(self) -> tuple[EngineEntry, ...]:
        return tuple(entry for entry in self._entries.values() if entry.state in LIVING)

    def in_state(self, *states: EngineState) -> tuple[EngineEntry, ...]:
        return tuple(entry for entry in self._entries.values() if entry.state in states)

    def at(self, url: str) -> EngineEntry | None:
        """The living engine at this address."""
        return next((entry for entry in self.living() if entry.url and address(entry.url) == address(url)), None)

    def breaker(self, place: str) -> CircuitBreaker:
        return self._breakers.setdefault(place, new_breaker())

    def may_try(self, place: str, now: float) -> bool:
        """Whether an engine may be started, or caught up, at this place now."""
        return self.breaker(place).allows(now)

    def due(self, now: float, *, at_once: bool = False) -> tuple[EngineEntry, ...]:
        """Engines to be caught up: those that wait, and those in quarantine that answer again and are not ours to
        replace; `at_once`, also those at places where engines fail again and again."""
        waiting = self.in_state(EngineState.WAITING)
        healed = (
            entry for entry in self.in_state(EngineState.QUARANTINED) if entry.answers and not entry.origin.is_ours
        )
        return tuple(entry for entry in (*waiting, *healed) if at_once or self.may_try(entry.place, now))

    def breaker_state(self, engine_id: EngineId, now: float) -> BreakerState:
        return self.breaker(self[engine_id].place).state(now)

    def table(self, version: int) -> RoutingTable:
        """Every engine that has answered; those that do not serve are named, so that what runs there may end."""
        shown = self.in_state(EngineState.WAITING, EngineState.SERVING, EngineState.QUARANTINED, EngineState.LEAVING)
        return RoutingTable(
            version=version,
            engines=tuple(
                EngineRoute(
                    engine_id=entry.engine_id,
                    url=entry.url,
                    admitted=entry.state is EngineState.SERVING,
                    cache_namespace=entry.cache_namespace,
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
            raise EngineAddressTaken(f"{engine_id} and {other.engine_id} have one address, {url}: remove one of them")

    def _forget_the_oldest(self) -> None:
        gone = [entry.engine_id for entry in self._entries.values() if entry.state is EngineState.GONE]
        for engine_id in gone[:-REMEMBERED]:
            del self._entries[engine_id]


def is_loopback(host: str) -> bool:
    """Whether only this host reaches the address."""
    return host.startswith("127.") or host in ("localhost", "::1")


def address(url: str) -> tuple[str, int]:
    """Host and port, so that two spellings of one address are one."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("127.0.0.1" if host == "localhost" else host), port
