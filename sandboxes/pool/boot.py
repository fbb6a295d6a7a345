"""The way of one boot: host, queue, intent, create, and again elsewhere when that may help.

Invariants:
- Every create carries a key of its own boot, the same on every try: an ambiguous failure on one host makes no second
  sandbox there. What it may have made is killed once the boot succeeded elsewhere or was given up.
- Every try waits in a queue and takes a token; a first try that finds the queue full is refused at once.
- Time in queues and time of booting run by separate clocks; waiting for a provider that is full is time in a queue.
- A boot that is cancelled at any point leaves its sandbox to the reaper.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, cast

from headrace.sandboxes.base import AVOID_LABEL
from headrace.sandboxes.errors import BootTimeout, CapacityExceeded, QueueTimeout, SandboxError, TransientSandboxError
from headrace.sandboxes.pool.circuit_breaker import BreakerState
from headrace.sandboxes.pool.lease_table import Held
from headrace.sandboxes.pool.ledger import Entry, EntryState
from headrace.sandboxes.pool.placement import choose
from headrace.sandboxes.pool.slots import Priority, Ticket
from headrace.sandboxes.retry import is_ambiguous, retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.sandboxes.base import SandboxRef, SandboxSpec
    from headrace.sandboxes.pool.config import PoolConfig
    from headrace.sandboxes.pool.durable_leases import DurableLeases
    from headrace.sandboxes.pool.host import Host

PURPOSE_LABEL: Final = "purpose"
EVALUATE: Final = "evaluate"
"""A spec with the label purpose=evaluate is admitted before others."""
HELD_OUT: Final = "evaluation"
"""An agent's sandbox with the label purpose=evaluation is admitted before those of training."""
HOLDER_LABEL: Final = "holder"
"""Whose the sandbox is: all that a holder has is renewed, and released, together."""
OWNER_LABEL: Final = "headrace-owner"
"""Which pool booted a sandbox: it never touches those of another one on the same account."""
KEY_LABEL: Final = "headrace-key"
"""The idempotency key once more: not every provider lists those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A sandbox to lease. A clock of None never ends."""

    spec: SandboxSpec
    queue_timeout_s: float | None = None
    """In queues, over all tries: then QueueTimeout."""
    boot_timeout_s: float | None = None
    """Out of queues: creates, and waits between them."""
    avoid: tuple[str, ...] = ()
    """Hosts to boot on only when there is no other."""

    @property
    def holder(self) -> str:
        return self.spec.labels.get(HOLDER_LABEL, "")

    @property
    def priority(self) -> Priority:
        by_purpose = {EVALUATE: Priority.EVALUATION, HELD_OUT: Priority.HELD_OUT}
        return by_purpose.get(self.spec.labels.get(PURPOSE_LABEL, ""), Priority.ROLLOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A leased sandbox, and what it took to get it."""

    ref: SandboxRef
    queue_s: float = 0.0
    boot_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Boot:
    """One request on its way."""

    request: LeaseRequest
    ticket: Ticket
    key: str
    began_s: float
    pinned: str | None
    queue_s: float = 0.0
    refused: bool = False
    """By a queue: another try would only wait again."""
    full_since_s: float | None = None
    """The provider had no room then: until the next try this is waiting in a queue, its own."""
    full: int = 0
    """Tries that ended so."""
    tried: list[str] = field(default_factory=list)
    in_doubt: set[str] = field(default_factory=set)

    def boot_s(self, now: float) -> float:
        return now - self.began_s - self.queue_s

    def out_of_time(self, now: float, wait_s: float) -> bool:
        """Whether another try would begin too late, after so long a wait."""
        queue_limit_s, boot_limit_s = self.request.queue_timeout_s, self.request.boot_timeout_s
        waits_for_room = self.full_since_s is not None
        queue_s = self.queue_s + (wait_s if waits_for_room else 0.0)
        boot_s = self.boot_s(now) + (0.0 if waits_for_room else wait_s)
        return (
            self.refused
            or (queue_limit_s is not None and queue_s >= queue_limit_s)
            or (boot_limit_s is not None and boot_s >= boot_limit_s)
        )

    def found_no_room(self, now: float) -> None:
        """Without a clock of the queue such a try counts like any other."""
        if self.request.queue_timeout_s is not None:
            self.full_since_s, self.full = now, self.full + 1

    def goes_on(self, now: float) -> None:
        if self.full_since_s is not None:
            self.queue_s += now - self.full_since_s
            self.full_since_s = None


class Booter:
    """Boots on the hosts of a pool, under its `owner` label. `make_room` is told of a host without a free place."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        custody: DurableLeases,
        config: PoolConfig,
        owner: str,
        make_room: Callable[[Host], None],
    ) -> None:
        self._hosts = hosts
        self._custody = custody
        self._config = config
        self._owner = owner
        self._make_room = make_room
        self._last_number = 0
        self.retries = 0

    def number(self) -> int:
        """The next place in the order of arrival."""
        self._last_number += 1
        return self._last_number

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def boot(self, request: LeaseRequest, priority: Priority) -> Lease:
        """A held sandbox, durable. Raises SandboxError, after as many tries as the retry table allows."""
        boot = _Boot(
            request=request,
            ticket=Ticket(priority, self.number()),
            key=secrets.token_hex(12),
            began_s=self._now(),
            pinned=self._host_of_mounts(request.spec),
        )
        try:
            held = await self._try_often(boot)
        finally:
            self._settle(boot)
        return Lease(ref=held.ref, queue_s=boot.queue_s, boot_s=boot.boot_s(self._now()))

    async def _try_often(self, boot: _Boot) -> Held:
        """Tenacity costs more than a boot that goes well: it hears of the first try when that has failed."""
        try:
            return await self._try(boot)
        except TransientSandboxError as error:
            failed = [error]

        async def next_try() -> Held:
            if failed:
                raise failed.pop()
            return await self._try(boot)

        policy = retrying(self._config, lambda wait_s: boot.out_of_time(self._now(), wait_s), lambda: boot.full)
        return cast("Held", await policy(next_try))

    def _host_of_mounts(self, spec: SandboxSpec) -> str | None:
        """Frozen data is on the host of its sandbox."""
        sources = [self._custody.holdings.get(mount.source) for mount in spec.mounts]
        return next((held.host for held in sources if held is not None), None)

    def _settle(self, boot: _Boot) -> None:
        """Intents that became no holding: what the provider refused is nothing, the rest is looked for."""
        for name in dict.fromkeys(boot.tried):
            if name in boot.in_doubt:
                self._custody.doubt(name, boot.key)
            else:
                self._custody.refused(name, boot.key)

    async def _try(self, boot: _Boot) -> Held:
        boot.goes_on(self._now())
        host = await self._admitted(boot)
        if boot.tried:
            self.retries += 1
        boot.tried.append(host.name)
        try:
            ref = await self._create(boot, host)
        except BaseException as error:
            if is_ambiguous(error):
                boot.in_doubt.add(host.name)
            if isinstance(error, CapacityExceeded):
                boot.found_no_room(self._now())
            elif isinstance(error, SandboxError):
                error.host = error.host or host.name
            host.failed(boot.ticket, error)
            self._spread(host)
            raise
        return await self._hold(boot, host, ref)

    async def _admitted(self, boot: _Boot) -> Host:
        """The host on which this try may begin. Raises CapacityExceeded, QueueTimeout."""
        moved = False
        while True:
            host = self._choose(boot)
            if not host.has_room(boot.ticket.priority) and boot.ticket.priority is not Priority.WARM:
                self._make_room(host)
            if await self._wait(boot, host, again=moved or bool(boot.tried)):
                return host
            moved = True

    async def _wait(self, boot: _Boot, host: Host, *, again: bool) -> bool:
        limit_s, began_s = boot.request.queue_timeout_s, self._now()
        left_s = None if limit_s is None else max(0.0, limit_s - boot.queue_s)
        try:
            async with asyncio.timeout(left_s):
                return await host.admitted(boot.ticket, again=again)
        except TimeoutError as error:
            boot.refused = True
            raise QueueTimeout(
                f"no place within {limit_s:g} s (host {host.name}, {host.admission.waiting} others wait): raise "
                "sandbox.pool.max_live or lower the load"
            ) from error
        except SandboxError:
            boot.refused = True
            raise
        finally:
            boot.queue_s += self._now() - began_s

    def _choose(self, boot: _Boot) -> Host:
        if boot.pinned is not None:
            return self._hosts[boot.pinned]
        views = [host.view(boot.request.spec.image) for host in self._hosts.values()]
        return self._hosts[choose(views, boot.tried, boot.request.avoid)]

    async def _create(self, boot: _Boot, host: Host) -> SandboxRef:
        """One try on one host. Raises SandboxError."""
        await self._custody.intend(self._intent(boot, host))
        spec, limit_s = boot.request.spec, self._config.create_timeout_s
        avoid = {AVOID_LABEL: " ".join(boot.request.avoid)} if boot.request.avoid else {}
        if boot.request.boot_timeout_s is not None:
            limit_s = min(limit_s, max(0.0, boot.request.boot_timeout_s - boot.boot_s(self._now())))
        labels = {**spec.labels, **avoid, OWNER_LABEL: self._owner, KEY_LABEL: boot.key}
        try:
            async with asyncio.timeout(limit_s):
                return await host.provider.create(replace(spec, idempotency_key=boot.key, labels=labels))
        except TimeoutError as error:
            raise BootTimeout(f"no sandbox from host {host.name} within {limit_s:g} s") from error

    def _intent(self, boot: _Boot, host: Host) -> Entry:
        return Entry(
            host=host.name,
            key=boot.key,
            state=EntryState.INTENDED,
            request_key=boot.request.spec.idempotency_key,
            holder=boot.request.holder,
            image=boot.request.spec.image,
            deadline_s=self._custody.unix_s(self._now() + boot.request.spec.ttl_s),
        )

    def _spread(self, host: Host) -> None:
        """Those who wait for a host that takes no boots go to one that does."""
        if host.breaker is BreakerState.OPEN and any(other.takes_boots for other in self._hosts.values()):
            host.turn_away()

    async def _hold(self, boot: _Boot, host: Host, ref: SandboxRef) -> Held:
        """From here on the sandbox is known; whatever happens, it is held or ends."""
        spec = boot.request.spec
        until_s = self._now() + spec.ttl_s
        held = Held(
            ref=ref,
            host=host.name,
            key=boot.key,
            holder=boot.request.holder,
            request_key=spec.idempotency_key,
            image=spec.image,
            ticket=boot.ticket,
            deadline_s=until_s,
            dies_at_s=until_s,
            warm=boot.ticket.priority is Priority.WARM,
        )
        host.booted(boot.ticket, spec.image)
        self._custody.add(held)
        try:
            await self._custody.written(held)
        except BaseException:
            self._custody.end(held)
            raise
        return held
