"""The router of turns to engines, a pure state machine with a versioned routing table.

Invariants:
- A table is replaced as a whole, and only by one with a larger version. Its creator increments the version.
- A gate is a lease: it opens by itself when the lease ends, so a dead EngineGroup cannot keep an engine closed forever.
- An engine that is down gets no turns for a short time; the table decides whether it remains in use.
- A lineage stays on its engine (where its prefix is cached) while that engine is open and has at most `max_imbalance`
  more requests in flight than the least busy one. Among the least busy ones, the engine with the newest weights is
  chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId

if TYPE_CHECKING:
    from headrace.serve.gateway.capture.session import SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoute:
    """Address of an engine. `admitted` is false for an engine that must not get any traffic (because it is quarantined
    or has not caught up). `cache_namespace` is part of every request; it is the engine's version if pushes are in
    place. `attached` is true for a server that the engine group did not start: it has another key."""

    engine_id: EngineId
    url: str
    admitted: bool = True
    cache_namespace: str | None = None
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Routes of all engines. `version` grows with every change."""

    version: int
    engines: tuple[EngineRoute, ...]


class RoutingKey(NamedTuple):
    """Key of a conversation within a session: turns with the same `head` share a prefix."""

    session: SessionId
    head: bytes = b""


@dataclass(slots=True)
class Router:
    """Routing state of one gateway. `now` is a monotonic clock in seconds."""

    max_imbalance: int = 8
    table: RoutingTable = field(default_factory=lambda: RoutingTable(version=-1, engines=()))
    in_flight: dict[EngineId, int] = field(default_factory=dict)
    _closed_until: dict[EngineId, float] = field(default_factory=dict)
    _closed_since: dict[EngineId, float] = field(default_factory=dict)
    _closed_s: dict[EngineId, float] = field(default_factory=dict)
    """Total time in seconds for which each gate was closed, not counting the current closing."""
    _down_until: dict[EngineId, float] = field(default_factory=dict)
    _affinity: dict[SessionId, dict[bytes, EngineId]] = field(default_factory=dict)
    _versions: dict[EngineId, PolicyVersion] = field(default_factory=dict)
    _namespaces: dict[EngineId, str | None] = field(default_factory=dict)

    def replace(self, table: RoutingTable) -> bool:
        """Adopt a newer table; return False if it is not newer."""
        if table.version <= self.table.version:
            return False
        self.table = table
        self._namespaces = {route.engine_id: route.cache_namespace for route in table.engines}
        known = {route.engine_id for route in table.engines}
        self._closed_until = {engine: until for engine, until in self._closed_until.items() if engine in known}
        self._closed_since = {engine: since for engine, since in self._closed_since.items() if engine in known}
        self._closed_s = {engine: seconds for engine, seconds in self._closed_s.items() if engine in known}
        self._down_until = {engine: until for engine, until in self._down_until.items() if engine in known}
        return True

    def close_gate(self, engine_id: EngineId, until: float, now: float) -> None:
        """Close the gate, or renew its lease."""
        if not self.is_closed(engine_id, now):
            # An expired lease was a closing of its own.
            self._closed_s[engine_id] = self.closed_s(engine_id, now)
            self._closed_since[engine_id] = now
        self._closed_until[engine_id] = until

    def open_gate(self, engine_id: EngineId, now: float, cache_namespace: str | None = None) -> None:
        self._closed_s[engine_id] = self.closed_s(engine_id, now)
        self._closed_since.pop(engine_id, None)
        self._closed_until.pop(engine_id, None)
        self._namespaces[engine_id] = cache_namespace

    def closed_s(self, engine_id: EngineId, now: float) -> float:
        """Return the total time for which the engine's gate has been closed so far."""
        seconds, since = self._closed_s.get(engine_id, 0.0), self._closed_since.get(engine_id)
        return seconds if since is None else seconds + min(now, self._closed_until[engine_id]) - since

    def opens_in_s(self, engine_id: EngineId, now: float) -> float:
        """Return the number of seconds until the engine's gate opens by itself; 0 if it is open."""
        return max(0.0, self._closed_until.get(engine_id, now) - now)

    def namespace(self, engine_id: EngineId) -> str | None:
        """Return the cache namespace for new requests to this engine."""
        return self._namespaces.get(engine_id)

    def mark_down(self, engine_id: EngineId, until: float) -> None:
        """Do not choose the engine before `until`, because it has refused a connection."""
        self._down_until[engine_id] = until

    def is_closed(self, engine_id: EngineId, now: float) -> bool:
        return self._closed_until.get(engine_id, now) > now

    def closed(self, now: float) -> tuple[EngineId, ...]:
        """Return the engines whose gate is closed."""
        return tuple(engine for engine, until in self._closed_until.items() if until > now)

    def next_opening(self, now: float) -> float | None:
        """Return the time at which the first closed gate opens by itself or an engine that is down is tried again; None
        if there is neither."""
        ends = [*self._closed_until.values(), *self._down_until.values()]
        return min((until for until in ends if until > now), default=None)

    def note(self, engine_id: EngineId, spans: Sequence[VersionSpan]) -> None:
        """Record the version of an engine, from the spans of its answer."""
        if spans:
            self._versions[engine_id] = spans[-1].version

    def choose(self, lineage: RoutingKey, now: float, avoid: EngineId | None = None) -> EngineId | None:
        """Return the engine for the next turn of a lineage, or None if every gate is closed or every engine is down.

        `avoid` is the engine that just failed this turn: it is chosen again only if the table admits no other engine.
        """
        admitted = [route.engine_id for route in self.table.engines if route.admitted]
        others = [engine for engine in admitted if engine != avoid]
        candidates = [
            engine
            for engine in others or admitted
            if not self.is_closed(engine, now) and self._down_until.get(engine, now) <= now
        ]
        if not candidates:
            return None
        least_load = min(map(self._load, candidates))
        least = max((engine for engine in candidates if self._load(engine) == least_load), key=self._version)
        usual = self._affinity.get(lineage.session, {}).get(lineage.head)
        if usual in candidates and self._load(usual) <= least_load + self.max_imbalance:
            return usual
        self._affinity.setdefault(lineage.session, {})[lineage.head] = least
        return least

    def _version(self, engine_id: EngineId) -> tuple[int, int]:
        version = self._versions.get(engine_id)
        return (version.epoch, version.step) if version else (-1, -1)

    def _load(self, engine_id: EngineId) -> int:
        return self.in_flight.get(engine_id, 0)

    def begin(self, engine_id: EngineId) -> None:
        self.in_flight[engine_id] = self._load(engine_id) + 1

    def end(self, engine_id: EngineId) -> None:
        left = self._load(engine_id) - 1
        if left > 0:
            self.in_flight[engine_id] = left
        else:
            self.in_flight.pop(engine_id, None)

    def forget(self, session_id: SessionId) -> None:
        self._affinity.pop(session_id, None)
