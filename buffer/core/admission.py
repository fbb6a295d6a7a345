"""How many rollouts may start: pacing by inventory.

Invariants:
- Everything is computed from the present state; there is no counter that could drift.
- In mode `async` the inventory never exceeds `(max_staleness + 1) * batch_size`: what is in stock can still be trained
  within the bound.
- In mode `sync` only what the current batch still needs is started.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Rollouts in stock, by state."""

    pending: int
    in_flight: int
    waiting: int
    sealed: int
    leased: int

    @property
    def total(self) -> int:
        """Pending rollouts belong to opened groups: they will run, so they hold their place."""
        return self.pending + self.in_flight + self.waiting + self.sealed + self.leased


def groups_to_open(inventory: Inventory, *, batch_size: int, group_size: int, max_staleness: int, sync: bool) -> int:
    """Whole groups for which there is room.

    async: `floor(((max_staleness + 1) * batch_size - inventory) / group_size)`;
    sync: `ceil((batch_size - inventory) / group_size)`, so that a batch can always be filled.
    """
    if sync:
        return max(0, -(-(batch_size - inventory.total) // group_size))
    return max(0, ((max_staleness + 1) * batch_size - inventory.total) // group_size)
