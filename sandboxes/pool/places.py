"""Places of one sandbox host: who may take one now. Pure: no clock, no I/O.

Invariants:
- `booting + live <= max_live`, and at most `boot_concurrency` boot at once. Frozen sandboxes run nothing and do not
  count.
- Evaluations go first, and `evaluation_reserve` places are theirs alone: rollouts that hold a sandbox while they wait
  for an evaluation's can never stop each other. Agents on held-out tasks go before those on training tasks, warm
  sandboxes last.
- Within a priority the order is that of the numbers: whoever tries again has kept its own, and goes before later ones.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """What a sandbox is for; the lower goes first."""

    EVALUATION = 0
    """A clean sandbox of an evaluation: a rollout holds its own while it waits."""
    HELD_OUT = 1
    """An agent's sandbox on a held-out task: overtakes rollouts that queue, and has no place of its own."""
    ROLLOUT = 2
    """An agent's sandbox, and everything that says nothing about its purpose."""
    WARM = 3
    """One for later."""


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The right to wait for a place, then to have it. Tickets sort in the order in which they are served."""

    priority: Priority
    number: int


class Places:
    """Tickets go from waiting to booting to live, and leave from any of these."""

    def __init__(self, max_live: int, boot_concurrency: int, evaluation_reserve: int) -> None:
        self._max_live = max_live
        self._boot_concurrency = boot_concurrency
        self._reserve = evaluation_reserve
        self._queue: list[Ticket] = []
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
        heapq.heappush(self._queue, ticket)

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
        while self._queue and self._queue[0] not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0] if self._queue else None

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
