"""Lease table of one pool, with its sandboxes, their holders and deadlines.

Pure: no clock, no I/O; all times are from one monotonic clock.

Invariants:
- A sandbox has one holder; each of a holder's requests has at most one sandbox.
- A sandbox that is ending no longer has a lease or a holder; it stays in the table until its death is confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.sandboxes.pool.slots import Ticket


@dataclass(slots=True, kw_only=True, eq=False)
class HeldSandbox:
    """One sandbox of the pool."""

    ref: SandboxRef
    host: str
    key: str
    """The idempotency key with which it was created."""
    holder: str
    request_key: str
    image: str
    ticket: Ticket
    deadline_s: float
    """End of its lease."""
    dies_at_s: float
    """Time at which its provider ends it unless the lease is renewed there."""
    frozen: bool = False
    warm: bool = False
    """True if it was booted in advance and is waiting for a request."""
    ending: bool = False
    kills: int = 0
    """Number of failed attempts to kill it."""
    kill_at_s: float = 0.0
    """Time at which the next attempt to kill it is due."""


class LeaseTable:
    """Sandboxes by id, holder, request and host."""

    def __init__(self) -> None:
        self._by_id: dict[SandboxId, HeldSandbox] = {}
        self._by_request: dict[tuple[str, str], HeldSandbox] = {}
        self._by_holder: dict[str, dict[SandboxId, HeldSandbox]] = {}
        self._deadlines = Deadlines()

    def __iter__(self) -> Iterator[HeldSandbox]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, held: HeldSandbox) -> None:
        self._by_id[held.ref.id] = held
        if not held.ending:
            self._own(held)

    def _own(self, held: HeldSandbox) -> None:
        if held.request_key:
            self._by_request[held.holder, held.request_key] = held
        self._by_holder.setdefault(held.holder, {})[held.ref.id] = held
        self._deadlines.set(held.ref.id, held.deadline_s)

    def _disown(self, held: HeldSandbox) -> None:
        if self._by_request.get((held.holder, held.request_key)) is held:
            del self._by_request[held.holder, held.request_key]
        others = self._by_holder.get(held.holder, {})
        others.pop(held.ref.id, None)
        if not others:
            self._by_holder.pop(held.holder, None)
        self._deadlines.drop(held.ref.id)

    def hand_over(self, held: HeldSandbox, *, holder: str, request_key: str, deadline_s: float) -> None:
        """Change the holder of a sandbox."""
        self._disown(held)
        held.holder, held.request_key, held.deadline_s, held.warm = holder, request_key, deadline_s, False
        self._own(held)

    def get(self, sandbox: SandboxId) -> HeldSandbox | None:
        """Return the leased sandbox with this id, unless it is ending."""
        held = self._by_id.get(sandbox)
        return None if held is None or held.ending else held

    def has(self, sandbox: SandboxId) -> bool:
        """Return whether the table has this sandbox, leased or ending."""
        return sandbox in self._by_id

    def find(self, holder: str, request_key: str) -> HeldSandbox | None:
        """Return the sandbox of a request."""
        return self._by_request.get((holder, request_key))

    def of_holder(self, holder: str) -> list[HeldSandbox]:
        return list(self._by_holder.get(holder, {}).values())

    def of_host(self, host: str) -> list[HeldSandbox]:
        """Return a host's sandboxes, including those that are ending."""
        return [held for held in self._by_id.values() if held.host == host]

    def is_holder(self, holder: str) -> bool:
        return holder in self._by_holder

    def renew(self, held: HeldSandbox, deadline_s: float) -> None:
        held.deadline_s = deadline_s
        self._deadlines.set(held.ref.id, deadline_s)

    def end(self, held: HeldSandbox) -> None:
        """End the lease of a sandbox that is to be killed. Idempotent."""
        if not held.ending:
            held.ending, held.warm = True, False
            self._disown(held)

    def remove(self, held: HeldSandbox) -> bool:
        """Remove a sandbox. Returns False if it had already been removed."""
        if self._by_id.get(held.ref.id) is not held:
            return False
        self._disown(held)
        del self._by_id[held.ref.id]
        return True

    def pop_expired(self, now: float) -> list[HeldSandbox]:
        """End the expired leases and return their sandboxes."""
        expired = [self._by_id[SandboxId(sandbox)] for sandbox in self._deadlines.pop_due(now)]
        for held in expired:
            self.end(held)
        return expired

    def next_due_s(self) -> float | None:
        """Return the time at which the next lease expires or the next kill is due, or None."""
        times = [held.kill_at_s for held in self._by_id.values() if held.ending]
        lease_s = self._deadlines.next()
        return min([*times, *([] if lease_s is None else [lease_s])], default=None)

    def kills_due(self, now: float) -> list[HeldSandbox]:
        return [held for held in self._by_id.values() if held.ending and held.kill_at_s <= now]
