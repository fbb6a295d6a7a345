"""Which sandboxes a pool has, for whom and until when. Pure: no clock, no I/O; times are those of one monotonic clock.

Invariants:
- A sandbox is held once, for one holder; a request of a holder has at most one sandbox.
- What ends is nobody's any more: it has no lease, and waits only for its death to be confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sandboxes.base import SandboxId
from headrace.sandboxes.launcher.leases import Deadlines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.sandboxes.base import SandboxRef
    from headrace.sandboxes.pool.slots import Ticket


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """One sandbox of the pool."""

    ref: SandboxRef
    host: str
    key: str
    """The idempotency key that its provider was given."""
    holder: str
    request_key: str
    image: str
    ticket: Ticket
    deadline_s: float
    """End of its lease."""
    dies_at_s: float
    """When its provider ends it by itself if nothing is heard."""
    frozen: bool = False
    warm: bool = False
    """It waits for whoever comes next."""
    ending: bool = False
    kills: int = 0
    """Tries of its kill that failed."""
    kill_at_s: float = 0.0
    """When the next one is due."""


class LeaseTable:
    """Held sandboxes by id, holder, request and host."""

    def __init__(self) -> None:
        self._by_id: dict[SandboxId, Held] = {}
        self._by_request: dict[tuple[str, str], Held] = {}
        self._by_holder: dict[str, dict[SandboxId, Held]] = {}
        self._leases = Deadlines()

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, held: Held) -> None:
        self._by_id[held.ref.id] = held
        if not held.ending:
            self._own(held)

    def _own(self, held: Held) -> None:
        if held.request_key:
            self._by_request[held.holder, held.request_key] = held
        self._by_holder.setdefault(held.holder, {})[held.ref.id] = held
        self._leases.set(held.ref.id, held.deadline_s)

    def _disown(self, held: Held) -> None:
        if self._by_request.get((held.holder, held.request_key)) is held:
            del self._by_request[held.holder, held.request_key]
        others = self._by_holder.get(held.holder, {})
        others.pop(held.ref.id, None)
        if not others:
            self._by_holder.pop(held.holder, None)
        self._leases.drop(held.ref.id)

    def hand_over(self, held: Held, *, holder: str, request_key: str, deadline_s: float) -> None:
        """Somebody else's from now on."""
        self._disown(held)
        held.holder, held.request_key, held.deadline_s, held.warm = holder, request_key, deadline_s, False
        self._own(held)

    def get(self, sandbox: SandboxId) -> Held | None:
        """What is leased under this id; not what ends."""
        held = self._by_id.get(sandbox)
        return None if held is None or held.ending else held

    def has(self, sandbox: SandboxId) -> bool:
        """What ends counts too."""
        return sandbox in self._by_id

    def find(self, holder: str, request_key: str) -> Held | None:
        """What this request of the holder has."""
        return self._by_request.get((holder, request_key))

    def of_holder(self, holder: str) -> list[Held]:
        return list(self._by_holder.get(holder, {}).values())

    def of_host(self, host: str) -> list[Held]:
        """Those that end too."""
        return [held for held in self._by_id.values() if held.host == host]

    def is_holder(self, holder: str) -> bool:
        return holder in self._by_holder

    def renew(self, held: Held, deadline_s: float) -> None:
        held.deadline_s = deadline_s
        self._leases.set(held.ref.id, deadline_s)

    def end(self, held: Held) -> None:
        """Nobody's from now on, to be killed. Idempotent."""
        if not held.ending:
            held.ending, held.warm = True, False
            self._disown(held)

    def remove(self, held: Held) -> bool:
        """It is gone. False when that was known."""
        if self._by_id.get(held.ref.id) is not held:
            return False
        self._disown(held)
        del self._by_id[held.ref.id]
        return True

    def pop_expired(self, now: float) -> list[Held]:
        """Those whose lease is over; they end."""
        expired = [self._by_id[SandboxId(sandbox)] for sandbox in self._leases.pop_due(now)]
        for held in expired:
            self.end(held)
        return expired

    def next_due_s(self) -> float | None:
        """When the next lease is over or the next kill is due; None for never."""
        times = [held.kill_at_s for held in self._by_id.values() if held.ending]
        lease_s = self._leases.next()
        return min([*times, *([] if lease_s is None else [lease_s])], default=None)

    def kills_due(self, now: float) -> list[Held]:
        return [held for held in self._by_id.values() if held.ending and held.kill_at_s <= now]
