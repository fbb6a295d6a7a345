"""A pool's leases and intents, in memory and in its ledger.

Invariants:
- Every create is preceded by a durable intent; no ref is returned before it is in the ledger.
- An intent becomes a lease, is dropped (the provider refused), or is left in doubt; in the last case, its key is
  searched for until the provider can no longer start the sandbox.
- Memory is changed first and without an await, so that no task sees a partial change; the ledger follows in the same
  order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.sandboxes.pool.lease_table import HeldSandbox, LeaseTable
from headrace.sandboxes.pool.ledger import Drop, Entry, EntryState, HolderGone, Renewed, SandboxLedgerWriter
from headrace.sandboxes.pool.slots import Priority


class DurableLeases:
    """Lease table and intents with their ledger. `settle_s` is how long after an abandoned create its sandbox may still
    start; `clock` returns Unix seconds."""

    def __init__(self, writer: SandboxLedgerWriter, *, settle_s: float, clock: Callable[[], float] = time.time) -> None:
        self.table = LeaseTable()
        self._writer = writer
        self._settle_s = settle_s
        self._clock = clock
        self._intents: dict[tuple[str, str], Entry] = {}
        self._doubts: dict[tuple[str, str], float] = {}
        self.changed = asyncio.Event()
        """Set when the reaper may have to act earlier than planned."""

    def unix_s(self, loop_s: float) -> float:
        return loop_s - self._now() + self._clock()

    def loop_s(self, unix_s: float) -> float:
        return unix_s - self._clock() + self._now()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # Intents

    async def intend(self, entry: Entry) -> None:
        """Record the intent to create a sandbox. Idempotent."""
        name = (entry.host, entry.key)
        self._doubts.pop(name, None)
        if name not in self._intents:
            self._intents[name] = entry
            await self._writer.write(entry)

    def refused(self, host: str, key: str) -> None:
        """Drop an intent: the provider reports that it made no sandbox."""
        if self._intents.pop((host, key), None) is not None:
            self._writer.post(Drop(host, key))

    def doubt(self, host: str, key: str) -> None:
        """Mark an intent as in doubt: the create was abandoned, and it is unknown whether there is a sandbox."""
        if self._intents.pop((host, key), None) is not None:
            self.suspect(host, key)

    def suspect(self, host: str, key: str) -> None:
        """Search for an unwanted sandbox with this key, which may still start."""
        self._doubts[host, key] = self._now() + self._settle_s
        self.changed.set()

    def is_intended(self, host: str, key: str) -> bool:
        return (host, key) in self._intents

    def has_doubts(self, host: str) -> bool:
        return any(name[0] == host for name in self._doubts)

    def settle(self, host: str, looked_at_s: float) -> None:
        """Drop those doubts about a host that had already expired at `looked_at_s`, when a complete sweep of the host
        began."""
        for name in [name for name, until_s in self._doubts.items() if name[0] == host and until_s < looked_at_s]:
            del self._doubts[name]
            self._writer.post(Drop(*name))

    # Leases

    def add(self, held: HeldSandbox) -> None:
        """Replace the intent to create this sandbox with the sandbox itself. The change is durable once `written`
        returns."""
        self._intents.pop((held.host, held.key), None)
        self.table.add(held)
        self.changed.set()

    async def written(self, held: HeldSandbox) -> None:
        await self._writer.write(self.entry(held))

    def renew(self, held: HeldSandbox, deadline_s: float) -> None:
        self.table.renew(held, deadline_s)
        self._writer.post(self.entry(held))

    def renew_holder(self, holder: str, deadline_s: float) -> list[HeldSandbox]:
        """Renew all leases of a holder with a single ledger row."""
        renewed = self.table.of_holder(holder)
        for held in renewed:
            self.table.renew(held, max(held.deadline_s, deadline_s))
        if renewed:
            self._writer.post(Renewed(holder, self.unix_s(deadline_s)))
        return renewed

    def end(self, held: HeldSandbox) -> None:
        """End a lease; the reaper retries the kill until the sandbox is gone. Idempotent."""
        if held.ending or self.table.get(held.ref.id) is not held:
            return
        self.table.end(held)
        self.record_end(held)
        self.changed.set()

    def record_end(self, held: HeldSandbox) -> None:
        """Record the end of a lease that the table has already ended, and make its kill due."""
        held.kill_at_s = self._now()
        self._writer.post(self.entry(held), *self._if_last(held.holder))

    def gone(self, held: HeldSandbox) -> bool:
        """Drop a dead sandbox. Returns False if it had already been dropped."""
        if not self.table.remove(held):
            return False
        self._writer.post(Drop(held.host, held.key), *self._if_last(held.holder))
        return True

    def _if_last(self, holder: str) -> list[HolderGone]:
        return [] if self.table.is_holder(holder) else [HolderGone(holder)]

    def entry(self, held: HeldSandbox) -> Entry:
        return Entry(
            host=held.host,
            key=held.key,
            state=EntryState.ENDING if held.ending or held.warm else EntryState.HELD,
            request_key=held.request_key,
            holder=held.holder,
            image=held.image,
            deadline_s=self.unix_s(held.deadline_s),
            frozen=held.frozen,
            evaluation=held.ticket.priority is Priority.EVALUATION,
            ref=held.ref,
        )
