"""Who may boot a sandbox now: the pure core of the pool.

Invariants:
- `booting + live <= max_live`, and at most `boot_concurrency` boot at once. Frozen sandboxes run nothing and do not
  count.
- Evaluations go first, and `evaluation_reserve` places are theirs alone: rollouts that hold a sandbox while they wait
  for an evaluation's can never stop each other.
- Within a kind the order is first come, first served. No clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import NewType

from pydantic import BaseModel, ConfigDict, Field, model_validator

Ticket = NewType("Ticket", int)


class AdmissionConfig(BaseModel):
    """Places of one sandbox host or account."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_live: int = Field(default=64, ge=2)
    """Sandboxes that boot or run at once."""
    boot_concurrency: int = Field(default=8, ge=1)
    """Boots at once; more only wait for each other on the same cores."""
    evaluation_reserve: int = Field(default=4, ge=1)
    """Places of `max_live` that only evaluations may take."""

    @model_validator(mode="after")
    def _reserve_leaves_room(self) -> AdmissionConfig:
        if self.evaluation_reserve >= self.max_live:
            raise ValueError(
                f"evaluation_reserve={self.evaluation_reserve} leaves no place of max_live={self.max_live}"
            )
        return self


class Admission:
    """Tickets go from waiting to booting to live, and leave from any of these."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._evaluations: deque[Ticket] = deque()
        self._others: deque[Ticket] = deque()
        self._booting: set[Ticket] = set()
        self._live: set[Ticket] = set()
        self._last = 0

    @property
    def waiting(self) -> int:
        return len(self._evaluations) + len(self._others)

    @property
    def booting(self) -> int:
        return len(self._booting)

    @property
    def live(self) -> int:
        return len(self._live)

    def ask(self, *, evaluation: bool) -> Ticket:
        """Queue for a place; `grant` says when."""
        self._last += 1
        ticket = Ticket(self._last)
        (self._evaluations if evaluation else self._others).append(ticket)
        return ticket

    def grant(self) -> list[Ticket]:
        """Tickets that may boot now, in order; they are booting from here on."""
        granted: list[Ticket] = []
        while len(self._booting) < self._config.boot_concurrency and (queue := self._next_queue()) is not None:
            ticket = queue.popleft()
            self._booting.add(ticket)
            granted.append(ticket)
        return granted

    def _next_queue(self) -> deque[Ticket] | None:
        taken = len(self._booting) + len(self._live)
        if self._evaluations:
            return self._evaluations if taken < self._config.max_live else None
        if self._others and taken < self._config.max_live - self._config.evaluation_reserve:
            return self._others
        return None

    def booted(self, ticket: Ticket) -> None:
        self._booting.remove(ticket)
        self._live.add(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give the place back: withdrawn, failed, frozen, released or dead. Idempotent."""
        self._booting.discard(ticket)
        self._live.discard(ticket)
        for queue in (self._evaluations, self._others):
            if ticket in queue:
                queue.remove(ticket)
