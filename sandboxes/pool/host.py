"""One host or account of a pool, with its provider and the queue for its boots.

Invariants:
- A waiting boot is admitted as soon as possible: when a slot is freed, a token arrives, or a probe is due.
- A boot that stops waiting, even while it is being admitted, occupies no slot.
- Hosts that accept boots are preferred, then hosts outside `avoid`, then hosts that have been tried less often. Among
  equals, the least loaded host is chosen, where having the image is worth a load of `LOCALITY`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from headrace.buffer.primitives.circuit_breaker import BreakerState
from headrace.sandboxes.base import SandboxProvider
from headrace.sandboxes.pool.admission import Admission, AdmissionConfig
from headrace.sandboxes.pool.slots import Priority, Ticket


class PoolHost:
    """A provider with its admission; `close` it once no boot is waiting. `waits` is set whenever a boot has to wait."""

    def __init__(self, name: str, provider: SandboxProvider, config: AdmissionConfig, waits: asyncio.Event) -> None:
        self.name = name
        self.provider = provider
        self.admission = Admission(config)
        self.images: set[str] = set()
        """Images that have booted on this host."""
        self._waits = waits
        self._granted: dict[Ticket, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def breaker(self) -> BreakerState:
        return self.admission.breaker(self._now())

    @property
    def takes_boots(self) -> bool:
        """True if the breaker allows boots; a half-open breaker allows one, the probe."""
        state = self.breaker
        idle = self.admission.waiting + self.admission.booting == 0
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and idle)

    def view(self, image: str) -> HostView:
        return HostView(
            name=self.name, is_open=self.takes_boots, load=self.admission.load, has_image=image in self.images
        )

    def has_room(self, priority: Priority) -> bool:
        return self.admission.has_room(priority)

    async def admitted(self, ticket: Ticket, *, again: bool) -> bool:
        """Wait for admission. Returns False if this host stops accepting boots. Raises CapacityExceeded immediately if
        the queue is full."""
        self.admission.enqueue(ticket, self._now(), again=again)
        granted: asyncio.Future[bool]
        granted = self._granted[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._pump()
            if not granted.done():
                self._waits.set()
            return await granted
        except BaseException:
            self.leave(ticket)
            raise
        finally:
            del self._granted[ticket]

    def turn_away(self) -> None:
        """Send the waiting boots to other hosts."""
        for ticket, granted in self._granted.items():
            if not granted.done():
                self.admission.leave(ticket)
                granted.set_result(False)

    def booted(self, ticket: Ticket, image: str) -> None:
        self.images.add(image)
        self.admission.booted(ticket)
        self._pump()

    def failed(self, ticket: Ticket, error: BaseException) -> None:
        self.admission.failed(ticket, error, self._now())
        self._pump()

    def adopt(self, ticket: Ticket, image: str) -> None:
        self.images.add(image)
        self.admission.adopt(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Free a ticket's slot. Idempotent."""
        self.admission.leave(ticket)
        self._pump()

    def _pump(self) -> None:
        for ticket in self.admission.grant(self._now()):
            granted = self._granted.get(ticket)
            if granted is None or granted.done():
                # It stopped waiting just now; `admitted` frees its place.
                continue
            granted.set_result(True)
        self.close()
        wait_s = self.admission.next_grant_s(self._now())
        self._timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, self._pump)

    def close(self) -> None:
        """Cancel the timer for the next admission."""
        if self._timer is not None:
            self._timer.cancel()


LOCALITY: Final = 0.5
"""A host without the image is chosen only if the hosts with it are busier by more than this share of their slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """Properties of a host on which the choice depends."""

    name: str
    is_open: bool
    """True if the host accepts boots."""
    load: float
    """Number of waiting, booting and live sandboxes, divided by its slots."""
    has_image: bool


def choose(hosts: Collection[HostView], tried: Collection[str], avoid: Collection[str] = ()) -> str:
    """Return the name of the best host; there must be at least one."""

    def rank(host: HostView) -> tuple[bool, bool, int, float, str]:
        tries = sum(name == host.name for name in tried)
        return not host.is_open, host.name in avoid, tries, host.load + (0.0 if host.has_image else LOCALITY), host.name

    return min(hosts, key=rank).name
