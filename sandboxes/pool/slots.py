"""Assignment of one sandbox host's slots to waiting boots. Pure: no clock, no I/O.

Invariants:
- `booting + live <= max_live`, and at most `boot_concurrency` sandboxes boot at once. Frozen sandboxes run nothing and
  do not count.
- Evaluations go first, and only they may use the `evaluation_reserve` slots, so rollouts that hold a sandbox while they
  wait for an evaluation's can never deadlock. Agents on held-out tasks go before those on training tasks, warm
  sandboxes last.
- While an agent on a training task is waiting, agents on held-out tasks take at most their share of the slots and of
  the concurrent boots that evaluations leave to agents, so they delay training but do not stop it. When none is
  waiting, they may take everything that is free.
- Tickets of one priority are served in the order of their numbers: a retry has the number of its first attempt.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """Purpose of a sandbox; lower values are served first."""

    EVALUATION = 0
    """A clean sandbox for an evaluation; a rollout waits for it while holding a sandbox of its own."""
    HELD_OUT = 1
    """An agent's sandbox on a held-out task. Up to their share, such sandboxes overtake those for training, but no
    slots are reserved for them."""
    ROLLOUT = 2
    """An agent's sandbox, and any other without a purpose label."""
    WARM = 3
    """A sandbox booted in advance."""


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The right to wait for a slot and then to hold it. Tickets sort in the order in which they are served."""

    priority: Priority
    number: int


class Slots:
    """Slots of one host. Tickets go from waiting to booting to live, and may leave at any stage."""

    def __init__(
        self, max_live: int, boot_concurrency: int, evaluation_reserve: int, held_out_share: float = 1.0
    ) -> None:
        self._max_live = max_live
        self._boot_concurrency = boot_concurrency
        self._reserve = evaluation_reserve
        self._held_out_live = math.ceil(held_out_share * (max_live - evaluation_reserve))
        self._held_out_share = held_out_share
        self._queues: dict[Priority, list[Ticket]] = {priority: [] for priority in Priority}
        self._waiting: set[Ticket] = set()
        self._booting: set[Ticket] = set()
        self._live: set[Ticket] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def booting(self) -> int:
        return len(self._booting)

    @property
    def live(self) -> int:
        return len(self._live)

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a ticket for a slot."""
        self._waiting.add(ticket)
        heapq.heappush(self._queues[ticket.priority], ticket)

    def next(self) -> Ticket | None:
        """Return the ticket that may boot now, if any."""
        first = self._first()
        if first is None or len(self._booting) >= self._boot_concurrency:
            return None
        return first if self.has_room(first.priority) else None

    def is_short(self) -> bool:
        """Return whether a ticket other than a warm one is waiting without a free slot."""
        first = self._first()
        return first is not None and first.priority is not Priority.WARM and not self.has_room(first.priority)

    def _first(self) -> Ticket | None:
        """Return the next ticket, whether or not there is room for it."""
        heads: dict[Priority, Ticket] = {}
        for priority, queue in self._queues.items():
            while queue and queue[0] not in self._waiting:
                heapq.heappop(queue)
            if queue:
                heads[priority] = queue[0]
        if {Priority.HELD_OUT, Priority.ROLLOUT} <= heads.keys():
            live = sum(ticket.priority is Priority.HELD_OUT for ticket in self._live)
            kinds = [ticket.priority for ticket in self._booting]
            booting = kinds.count(Priority.HELD_OUT)
            share = int(self._held_out_share * (self._boot_concurrency - kinds.count(Priority.EVALUATION)))
            if booting >= max(1, share) or booting + live >= self._held_out_live:
                del heads[Priority.HELD_OUT]
        return next(iter(heads.values()), None)

    def has_room(self, priority: Priority) -> bool:
        """Return whether a slot is free for this priority, regardless of other waiting tickets."""
        room = self._max_live - (0 if priority is Priority.EVALUATION else self._reserve)
        return len(self._booting) + len(self._live) < room

    def start(self, ticket: Ticket) -> None:
        """Move the ticket that `next` returned from waiting to booting."""
        self._waiting.remove(ticket)
        self._booting.add(ticket)

    def booted(self, ticket: Ticket) -> None:
        self._booting.remove(ticket)
        self._live.add(ticket)

    def adopt(self, ticket: Ticket) -> None:
        """Give a slot to a sandbox that is already running, whether or not there is room."""
        self._live.add(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Free the slot of a ticket that was withdrawn, or whose sandbox failed, was frozen or released, or died.
        Idempotent."""
        self._waiting.discard(ticket)
        self._booting.discard(ticket)
        self._live.discard(ticket)
