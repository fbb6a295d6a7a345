"""The boot of one sandbox: choice of a host, queue, intent, create, and retries on other hosts.

Invariants:
- Every create carries its boot's key, the same on every attempt, so an ambiguous failure on one host never leads to a
  second sandbox there. A sandbox that such a failure may have left is killed once the boot has succeeded elsewhere or
  failed.
- Every attempt waits in a queue and takes a token; a first attempt that finds the queue full is refused at once.
- Queueing time and boot time have separate limits; waiting for a provider that is full counts as queueing time.
- A boot that is cancelled at any point leaves its sandbox to the reaper.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, cast

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from headrace.buffer.primitives.circuit_breaker import BreakerState
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.primitives.timed_span import interval_clock, moment_between, unix_s
from headrace.buffer.primitives.trace_context import remote_context
from headrace.sandboxes.base import AVOID_LABEL, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import BootTimeout, CapacityExceeded, QueueTimeout, SandboxError, TransientSandboxError
from headrace.sandboxes.pool import boot_spans
from headrace.sandboxes.pool.config import PoolConfig
from headrace.sandboxes.pool.durable_leases import DurableLeases
from headrace.sandboxes.pool.host import PoolHost, choose
from headrace.sandboxes.pool.lease_table import HeldSandbox
from headrace.sandboxes.pool.ledger import Entry, EntryState
from headrace.sandboxes.pool.slots import Priority, Ticket
from headrace.sandboxes.retry import is_ambiguous, retrying

PURPOSE_LABEL: Final = "purpose"
EVALUATE: Final = "evaluate"
"""Value of the purpose label; a spec with purpose=evaluate is admitted before others."""
HELD_OUT: Final = "evaluation"
"""Value of the purpose label; an agent's sandbox on a held-out task has purpose=evaluation and is admitted before those
for training."""
HOLDER_LABEL: Final = "holder"
"""Label with the sandbox's holder; all sandboxes of a holder are renewed and released together."""
OWNER_LABEL: Final = "headrace-owner"
"""Label with the pool that booted the sandbox; a pool never touches another pool's sandboxes on the same account."""
KEY_LABEL: Final = "headrace-key"
"""Label with a copy of the idempotency key, because not every provider lists the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A sandbox to lease. A timeout of None means no limit."""

    spec: SandboxSpec
    queue_timeout_s: float | None = None
    """Total queueing time over all attempts, after which QueueTimeout is raised."""
    boot_timeout_s: float | None = None
    """Limit on the time outside of queues: creates, and the waits between them."""
    avoid: tuple[str, ...] = ()
    """Hosts to use only if no other host is available."""
    traceparent: str = ""
    """W3C trace context of the span that waits for the lease, the parent of the pool's spans."""

    @property
    def holder(self) -> str:
        return self.spec.labels.get(HOLDER_LABEL, "")

    @property
    def priority(self) -> Priority:
        by_purpose = {EVALUATE: Priority.EVALUATION, HELD_OUT: Priority.HELD_OUT}
        return by_purpose.get(self.spec.labels.get(PURPOSE_LABEL, ""), Priority.ROLLOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A leased sandbox, and the time spent on queueing and booting."""

    ref: SandboxRef
    queue_s: float = 0.0
    boot_s: float = 0.0
    tries: int = 1
    """Number of boots that were begun."""
    warm: bool = False
    """True if the sandbox had been booted before it was asked for."""
    segments: tuple[Segment, ...] = ()
    """Waits in queues (`queue`) and boots (`boot`) in order, each with its host and why it failed, in seconds before
    the lease was complete (negative numbers)."""
    at_s: float | None = None
    """Unix time at which the lease was complete."""


def placed(lease: Lease | SandboxError, start_s: float, end_s: float) -> list[Segment]:
    """Return the waits and boots of a lease, or of one that failed, by the interval clock of a caller who asked for it
    at `start_s` and had the answer at `end_s`."""
    length_s = -lease.segments[0].start_s if lease.segments else 0.0
    shift_s = moment_between(min(end_s, start_s + length_s), end_s, lease.at_s)
    return [each.moved(shift_s) for each in lease.segments]


@dataclass(slots=True, kw_only=True)
class _Boot:
    """The state of one request while its sandbox is being booted."""

    request: LeaseRequest
    ticket: Ticket
    key: str
    began_s: float
    pinned: str | None
    """The only host that can serve the request."""
    refused: bool = False
    """True if a queue has refused the request; another attempt would only wait again."""
    full_since_s: float | None = None
    """Time at which the provider had no capacity; the time from then until the next attempt counts as queueing time."""
    full: int = 0
    """Number of attempts that found the provider full."""
    context: Context | None = None
    """Trace context of the request."""
    tried: list[str] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    in_doubt: set[str] = field(default_factory=set)

    @property
    def queue_s(self) -> float:
        """Queueing time so far."""
        return sum(each.seconds for each in self.segments if each.part == boot_spans.QUEUE)

    def before(self, now: float) -> tuple[Segment, ...]:
        """Return the waits and boots in seconds before now."""
        return tuple(each.moved(-now) for each in self.segments)

    def boot_s(self, now: float) -> float:
        return now - self.began_s - self.queue_s

    def out_of_time(self, now: float, wait_s: float) -> bool:
        """Return whether another attempt after `wait_s` would exceed a limit."""
        queue_limit_s, boot_limit_s = self.request.queue_timeout_s, self.request.boot_timeout_s
        waits_for_room = self.full_since_s is not None
        queue_s = self.queue_s + (wait_s if waits_for_room else 0.0)
        boot_s = self.boot_s(now) + (0.0 if waits_for_room else wait_s)
        return (
            self.refused
            or (queue_limit_s is not None and queue_s >= queue_limit_s)
            or (boot_limit_s is not None and boot_s >= boot_limit_s)
        )


class PoolBooter:
    """Boots sandboxes on a pool's hosts and labels them with the pool's `owner`. `make_room` is called with a host that
    has no free slot."""

    def __init__(
        self,
        hosts: Mapping[str, PoolHost],
        leases: DurableLeases,
        config: PoolConfig,
        owner: str,
        make_room: Callable[[PoolHost], None],
    ) -> None:
        self._hosts = hosts
        self._leases = leases
        self._config = config
        self._owner = owner
        self._make_room = make_room
        self._last_number = 0
        self.retries = 0

    def number(self) -> int:
        """Return the next number in the order of arrival."""
        self._last_number += 1
        return self._last_number

    @staticmethod
    def _now() -> float:
        return interval_clock()()

    async def boot(self, request: LeaseRequest, priority: Priority) -> Lease:
        """Boot a sandbox and record its lease. Raises SandboxError, after as many attempts as the retry table
        allows."""
        # Frozen data is on the host of its sandbox.
        sources = [self._leases.table.get(mount.source) for mount in request.spec.mounts]
        boot = _Boot(
            request=request,
            ticket=Ticket(priority, self.number()),
            key=secrets.token_hex(12),
            began_s=self._now(),
            pinned=next((held.host for held in sources if held is not None), None),
            context=remote_context(request.traceparent),
        )
        held: HeldSandbox | None = None
        failed: list[TransientSandboxError] = []

        async def next_try() -> HeldSandbox:
            if failed:
                raise failed.pop()
            return await self._try(boot)

        try:
            # Tenacity costs more than a boot that succeeds, so it sees the first attempt only once that has failed.
            try:
                held = await self._try(boot)
            except TransientSandboxError as error:
                failed.append(error)
            if held is None:
                policy = retrying(self._config, lambda wait_s: boot.out_of_time(self._now(), wait_s), lambda: boot.full)
                held = cast("HeldSandbox", await policy(next_try))
        except SandboxError as error:
            error.segments, error.at_s = boot.before(self._now()), unix_s()
            raise
        finally:
            # The intents that became no sandbox: a refused create made none, the others are searched for.
            for name in dict.fromkeys(boot.tried):
                if name in boot.in_doubt:
                    self._leases.doubt(name, boot.key)
                else:
                    self._leases.refused(name, boot.key)
        now = self._now()
        return Lease(
            ref=held.ref,
            queue_s=boot.queue_s,
            boot_s=boot.boot_s(now),
            tries=len(boot.tried),
            segments=boot.before(now),
            at_s=unix_s(),
        )

    async def _try(self, boot: _Boot) -> HeldSandbox:
        if boot.full_since_s is not None:
            waited = Segment(boot_spans.QUEUE, boot.full_since_s, self._now(), detail="no capacity")
            boot.segments.append(waited)
            boot.full_since_s = None
        host = await self._admitted(boot)
        if boot.tried:
            self.retries += 1
        spec = boot.request.spec
        attributes = _attributes(boot, host) | {boot_spans.SANDBOX_WARM: boot.ticket.priority is Priority.WARM}
        boot.tried.append(host.name)
        try:
            with boot_spans.boot_span(boot.context, attributes, boot.segments):
                ref = await self._create(boot, host)
        except BaseException as error:
            if is_ambiguous(error):
                boot.in_doubt.add(host.name)
            if isinstance(error, CapacityExceeded):
                # Without a limit for queues this attempt counts like any other failure.
                if boot.request.queue_timeout_s is not None:
                    boot.full_since_s, boot.full = self._now(), boot.full + 1
            elif isinstance(error, SandboxError):
                error.host = error.host or host.name
            host.failed(boot.ticket, error)
            if host.breaker is BreakerState.OPEN and any(other.takes_boots for other in self._hosts.values()):
                host.turn_away()
            raise
        # From here on the sandbox exists: whatever happens, it is held or killed.
        until_s = self._now() + spec.ttl_s
        held = HeldSandbox(
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
        self._leases.add(held)
        try:
            await self._leases.written(held)
        except BaseException:
            self._leases.end(held)
            raise
        return held

    async def _admitted(self, boot: _Boot) -> PoolHost:
        """Wait for a host on which this attempt may begin. Raises CapacityExceeded, QueueTimeout."""
        again = bool(boot.tried)
        while True:
            if boot.pinned is not None:
                host = self._hosts[boot.pinned]
            else:
                views = [host.view(boot.request.spec.image) for host in self._hosts.values()]
                host = self._hosts[choose(views, boot.tried, boot.request.avoid)]
            if not host.has_room(boot.ticket.priority) and boot.ticket.priority is not Priority.WARM:
                self._make_room(host)
            limit_s = boot.request.queue_timeout_s
            with boot_spans.queue_span(boot.context, _attributes(boot, host), boot.segments):
                try:
                    async with asyncio.timeout(None if limit_s is None else max(0.0, limit_s - boot.queue_s)):
                        if await host.admitted(boot.ticket, again=again):
                            return host
                except TimeoutError as error:
                    boot.refused = True
                    raise QueueTimeout(
                        f"no place was free within {limit_s:g} s (host {host.name}, {host.admission.waiting} others "
                        "waiting): raise sandbox.pool.max_live or lower the load"
                    ) from error
                except SandboxError:
                    boot.refused = True
                    raise
            # The host turned it away: it has been in a queue already, so another queue takes it even when full.
            again = True

    async def _create(self, boot: _Boot, host: PoolHost) -> SandboxRef:
        """Record the intent and create the sandbox on one host. Raises SandboxError."""
        spec, limit_s = boot.request.spec, self._config.create_timeout_s
        intent = Entry(
            host=host.name,
            key=boot.key,
            state=EntryState.INTENDED,
            request_key=spec.idempotency_key,
            holder=boot.request.holder,
            image=spec.image,
            deadline_s=self._leases.unix_s(self._now() + spec.ttl_s),
        )
        await self._leases.intend(intent)
        avoid = {AVOID_LABEL: " ".join(boot.request.avoid)} if boot.request.avoid else {}
        if boot.request.boot_timeout_s is not None:
            limit_s = min(limit_s, max(0.0, boot.request.boot_timeout_s - boot.boot_s(self._now())))
        labels = {**spec.labels, **avoid, OWNER_LABEL: self._owner, KEY_LABEL: boot.key}
        try:
            async with asyncio.timeout(limit_s):
                return await host.provider.create(replace(spec, idempotency_key=boot.key, labels=labels))
        except TimeoutError as error:
            raise BootTimeout(f"host {host.name} did not create a sandbox within {limit_s:g} s") from error


def _attributes(boot: _Boot, host: PoolHost) -> dict[str, AttributeValue]:
    """Return the span attributes of the next try."""
    return {
        boot_spans.SANDBOX_HOST: host.name,
        boot_spans.SANDBOX_IMAGE: boot.request.spec.image,
        boot_spans.SANDBOX_TRY: len(boot.tried) + 1,
    }
