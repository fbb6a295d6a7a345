"""Places of one sandbox host: who may take one now. Pure: no clock, no I/O.

Invariants:
- `booting + live <= max_live`, and at most `boot_concurrency` boot at once. Frozen sandboxes run nothing and do not
  count.
- Evaluations go first, and `evaluation_reserve` places are theirs alone: rollouts that hold a sandbox while they wait
  for an evaluation's can never stop each other. Agents on held-out tasks go before those on training tasks, warm
  sandboxes last.
- While an agent on a training task waits, those on held-out tasks take at most their share of the boots at once and of
  the places: an evaluation delays training, and does not stop it. When none waits they take what is free.
- Within a priority the order is that of the numbers: whoever tries again has kept its own, and goes before later ones.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """What a sandbox is for; the lower goes first."""

    EVALUATION = 0
    """A clean sandbox of an evaluation: a rollout holds its own while it waits."""
    HELD_OUT = 1
    """An agent's sandbox on a held-out task: overtakes rollouts that queue up to its share, and has no place of its
    own."""
    ROLLOUT = 2
    """An agent's sandbox, and everything that says nothing about its purpose."""
    WARM = 3
    """One for later."""


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The right to wait for a place, then to have it. Tickets sort in the order in which they are served."""

    priority: Priority
    number: int


class Slots:
    """Tickets go from waiting to booting to live, and leave from any of these."""

    def __init__(
        self, max_live: int, boot_concurrency: int, evaluation_reserve: int, held_out_share: float = 1.0
    ) -> None:
        self._max_live = max_live
        self._boot_concurrency = boot_concurrency
        self._reserve = evaluation_reserve
        self._held_out_live = math.ceil(held_out_share * (max_live - evaluation_reserve))
        self._held_out_boots = math.ceil(held_out_share * boot_concurrency)
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

    def ask(self, ticket: Ticket) -> None:
        """Queue for a place."""
        self._waiting.add(ticket)
        heapq.heappush(self._queues[ticket.priority], ticket)

    def next(self) -> Ticket | None:
        """Who may boot now, if anybody."""
        first = self._first()
        if first is None or len(self._booting) >= self._boot_concurrency:
            return None
        return first if self.has_room(first.priority) else None

    def is_short(self) -> bool:
        """Somebody waits for whom no place is free; warm ones can wait."""
        first = self._first()
        return first is not None and first.priority is not Priority.WARM and not self.has_room(first.priority)

    def _first(self) -> Ticket | None:
        """The one whose turn it is, whether or not there is room."""
        heads = {priority: head for priority in Priority if (head := self._head(priority)) is not None}
        if {Priority.HELD_OUT, Priority.ROLLOUT} <= heads.keys() and self._held_out_has_its_share():
            del heads[Priority.HELD_OUT]
        return next(iter(heads.values()), None)

    def _head(self, priority: Priority) -> Ticket | None:
        queue = self._queues[priority]
        while queue and queue[0] not in self._waiting:
            heapq.heappop(queue)
        return queue[0] if queue else None

    def _held_out_has_its_share(self) -> bool:
        booting = sum(ticket.priority is Priority.HELD_OUT for ticket in self._booting)
        live = sum(ticket.priority is Priority.HELD_OUT for ticket in self._live)
        return booting >= self._held_out_boots or booting + live >= self._held_out_live

    def has_room(self, priority: Priority) -> bool:
        """Whether a place is free for this priority, whoever else waits for it."""
        room = self._max_live - (0 if priority is Priority.EVALUATION else self._reserve)
        return len(self._booting) + len(self._live) < room

    def start(self, ticket: Ticket) -> None:
        """The ticket that `next` gave boots from here on."""
        self._waiting.remove(ticket)
        self._booting.add(ticket)

    def booted(self, ticket: Ticket) -> None:
        self._booting.remove(ticket)
        self._live.add(ticket)

    def adopt(self, ticket: Ticket) -> None:
        """A sandbox that lives already takes its place, whether or not there is room."""
        self._live.add(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give the place back: withdrawn, failed, frozen, released or dead. Idempotent."""
        self._waiting.discard(ticket)
        self._booting.discard(ticket)
        self._live.discard(ticket)
