"""What a pool answers for: holdings, intents, and their ledger, changed together.

Invariants:
- No create without a durable intent before it; no ref is given away before the ledger holds it.
- An intent ends as a holding, as nothing (the provider refused), or in doubt: then its key is looked for until the
  provider could no longer make it come to life.
- Memory is changed first and without a wait, so that nobody sees half of it; the ledger follows in the same order.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from headrace.sandboxes.pool.lease_table import Held, LeaseTable
from headrace.sandboxes.pool.ledger import Drop, Entry, EntryState, HolderGone, Renewed
from headrace.sandboxes.pool.slots import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.sandboxes.base import SandboxId
    from headrace.sandboxes.pool.ledger_writer import LedgerWriter


class DurableLeases:
    """`settle_s`: how long after a create was given up its sandbox may still come to life. `clock` gives Unix
    seconds."""

    def __init__(self, writer: LedgerWriter, *, settle_s: float, clock: Callable[[], float] = time.time) -> None:
        self.holdings = LeaseTable()
        self._writer = writer
        self._settle_s = settle_s
        self._clock = clock
        self._intents: dict[tuple[str, str], Entry] = {}
        self._doubts: dict[tuple[str, str], float] = {}
        self.changed = asyncio.Event()
        """Set when something may be due earlier than before."""

    def unix_s(self, loop_s: float) -> float:
        return loop_s - self._now() + self._clock()

    def loop_s(self, unix_s: float) -> float:
        return unix_s - self._clock() + self._now()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # Intents

    async def intend(self, entry: Entry) -> None:
        """Before a create. The same intent again is none."""
        name = (entry.host, entry.key)
        self._doubts.pop(name, None)
        if name not in self._intents:
            self._intents[name] = entry
            await self._writer.write(entry)

    def refused(self, host: str, key: str) -> None:
        """The provider says that it made nothing."""
        if self._intents.pop((host, key), None) is not None:
            self._writer.post(Drop(host, key))

    def doubt(self, host: str, key: str) -> None:
        """Given up, and nobody knows whether there is a sandbox."""
        if self._intents.pop((host, key), None) is not None:
            self.suspect(host, key)

    def suspect(self, host: str, key: str) -> None:
        """A sandbox of this key may come to life yet; nobody wants it."""
        self._doubts[host, key] = self._now() + self._settle_s
        self.changed.set()

    def is_intended(self, host: str, key: str) -> bool:
        return (host, key) in self._intents

    def has_doubts(self, host: str) -> bool:
        return any(name[0] == host for name in self._doubts)

    def settle(self, host: str, looked_at_s: float) -> None:
        """A look at everything on the host has begun at `looked_at_s` and is dealt with: old doubts are over."""
        for name in [name for name, until_s in self._doubts.items() if name[0] == host and until_s < looked_at_s]:
            del self._doubts[name]
            self._writer.post(Drop(*name))

    # Holdings

    def add(self, held: Held) -> None:
        """The intent of this key has become a sandbox. `written` makes it durable."""
        self._intents.pop((held.host, held.key), None)
        self.holdings.add(held)
        self.changed.set()

    async def written(self, held: Held) -> None:
        await self._writer.write(self.entry(held))

    def hand_over(self, held: Held, holder: str, request_key: str, deadline_s: float) -> None:
        """Somebody else's from now on. `written` makes it durable."""
        self.holdings.hand_over(held, holder=holder, request_key=request_key, deadline_s=deadline_s)

    def frozen(self, held: Held) -> None:
        """`written` makes it durable."""
        held.frozen = True

    def renew(self, held: Held, deadline_s: float) -> None:
        self.holdings.renew(held, deadline_s)
        self._writer.post(self.entry(held))

    def renew_holder(self, holder: str, deadline_s: float) -> list[Held]:
        """One row for all that it has."""
        renewed = self.holdings.of_holder(holder)
        for held in renewed:
            self.holdings.renew(held, max(held.deadline_s, deadline_s))
        if renewed:
            self._writer.post(Renewed(holder, self.unix_s(deadline_s)))
        return renewed

    def end(self, held: Held) -> None:
        """Nobody's from now on: the reaper kills it until it is gone. Idempotent."""
        if held.ending or self.holdings.get(held.ref.id) is not held:
            return
        held.kill_at_s = self._now()
        self.holdings.end(held)
        self._writer.post(self.entry(held), *self._if_last(held.holder))
        self.changed.set()

    def expired(self, held: Held) -> None:
        """Its lease is over, and `pop_expired` said so."""
        held.kill_at_s = self._now()
        self._writer.post(self.entry(held), *self._if_last(held.holder))

    def accounts_for(self, sandbox: SandboxId) -> bool:
        """It is held, or being ended."""
        return self.holdings.has(sandbox)

    def gone(self, held: Held) -> bool:
        """It is dead. False when that was known."""
        if not self.holdings.remove(held):
            return False
        self._writer.post(Drop(held.host, held.key), *self._if_last(held.holder))
        return True

    def _if_last(self, holder: str) -> list[HolderGone]:
        return [] if self.holdings.is_holder(holder) else [HolderGone(holder)]

    def entry(self, held: Held) -> Entry:
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
