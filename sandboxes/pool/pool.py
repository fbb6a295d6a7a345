"""The sandbox pool, which leases sandboxes on one or several hosts, in plain asyncio.

Invariants:
- Every spec of a `lease` yields a ref or a typed error, in the order of the specs; one failure does not end the others.
- A cancelled `lease` call leaves no sandbox behind. Releases, renewals and freezes never wait for a boot.
- Every lease has a deadline; a sandbox that nobody renews is killed by the pool, or by its provider if the pool is
  gone.
- A pool that is restarted with its ledger keeps its former leases and kills sandboxes that nobody holds (see
  `DurableLeases`, `Reaper`).
- The slot of a sandbox that died on its own is freed: while a lease is waiting, the provider is asked which sandboxes
  are alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import SandboxId, SandboxProvider, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import ProviderUnreachable, SandboxError, SandboxGone
from headrace.sandboxes.pool.boot import EVALUATE, PURPOSE_LABEL, Lease, LeaseRequest, PoolBooter
from headrace.sandboxes.pool.config import PoolConfig
from headrace.sandboxes.pool.durable_leases import DurableLeases
from headrace.sandboxes.pool.host import PoolHost
from headrace.sandboxes.pool.lease_table import HeldSandbox
from headrace.sandboxes.pool.ledger import Drop, Entry, EntryState, SandboxLedger, SandboxLedgerWriter
from headrace.sandboxes.pool.reaper import Reaper, Teardown
from headrace.sandboxes.pool.slots import Priority, Ticket
from headrace.sandboxes.pool.status import PoolStatus, Totals, status_of
from headrace.sandboxes.pool.warm import WarmStock


class Pool:
    """Leases sandboxes on `hosts` (providers by name). An async context manager that closes the providers and the
    ledger.

    Without a ledger the pool's state ends with its process. `owner` labels its sandboxes, so that pools can share an
    account; the default is stored in the ledger. `clock` returns Unix seconds."""

    def __init__(
        self,
        hosts: Mapping[str, SandboxProvider],
        config: PoolConfig | None = None,
        *,
        ledger: SandboxLedger | None = None,
        owner: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config or PoolConfig()
        self._ledger = ledger or SandboxLedger()
        self._writer = SandboxLedgerWriter(self._ledger)
        self._leases = DurableLeases(self._writer, settle_s=self._config.create_timeout_s, clock=clock)
        self._hosts = {
            name: PoolHost(name, provider, self._config, self._leases.changed) for name, provider in hosts.items()
        }
        self.owner = owner or self._ledger.owner
        self._totals = Totals()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._ledger.close)
            for host in self._hosts.values():
                stack.push_async_callback(host.provider.aclose)
                stack.callback(host.close)
            stack.push_async_callback(self._writer.close)
            tasks = await stack.enter_async_context(_background())
            parts = (self._hosts, self._leases)
            self._teardown = Teardown(*parts, self._config, tasks)
            self._reaper = Reaper(*parts, self._teardown, self._config, self.owner, tasks)
            self._booter = PoolBooter(*parts, self._config, self.owner, lambda host: self._warm.give_way(host))
            self._warm = WarmStock(*parts, self._booter, self._config, tasks, self.renew_holder)
            self._pending = PendingLeases(tasks)
            self._renewals = asyncio.Semaphore(self._config.teardown_concurrency)
            tasks.create_task(self._writer.run())
            for entry in self._ledger.load():
                self._recover(entry)
            sweeps = [self._reaper.sweep(host) for host in self._hosts.values()]
            tasks.create_task(self._reaper.run())
            tasks.create_task(self._warm.run())
            await asyncio.wait(sweeps)
            self._stack = stack.pop_all()
        return self

    def _recover(self, entry: Entry) -> None:
        """Adopt, kill or search for the sandbox in a ledger row from an earlier pool."""
        host = self._hosts.get(entry.host)
        if host is None:
            self._writer.post(Drop(entry.host, entry.key))
        elif entry.ref is None:
            self._leases.suspect(entry.host, entry.key)
        else:
            deadline_s = self._leases.loop_s(entry.deadline_s)
            priority = Priority.EVALUATION if entry.evaluation else Priority.ROLLOUT
            held = HeldSandbox(
                ref=entry.ref,
                host=entry.host,
                key=entry.key,
                holder=entry.holder,
                request_key=entry.request_key,
                image=entry.image,
                ticket=Ticket(priority, self._booter.number()),
                deadline_s=deadline_s,
                dies_at_s=deadline_s,
                frozen=entry.frozen,
                ending=entry.state is EntryState.ENDING,
            )
            self._leases.add(held)
            if not held.frozen:
                host.adopt(held.ticket, held.image)
            self._totals.adopted += not held.ending

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            # The pool may be broken: closing the providers ends their sandboxes, and expiring leases end the others.
            await self._stack.aclose()

    async def aclose(self) -> None:
        """End every sandbox of the pool, then the providers. Idempotent."""
        stack, self._stack = self._stack, AsyncExitStack()
        async with stack:
            await self._pending.cancel_all()
            await self.release([held.ref.id for held in self._leases.table])

    async def lease(self, specs: Sequence[SandboxSpec]) -> list[SandboxRef | SandboxError]:
        """Boot one sandbox for each spec. Return a ref or an error for each, in the order of the specs."""

        async def one(spec: SandboxSpec) -> SandboxRef | SandboxError:
            try:
                return (await self.lease_one(LeaseRequest(spec=spec))).ref
            except SandboxError as error:
                return error

        tasks: list[asyncio.Task[SandboxRef | SandboxError]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks.extend(group.create_task(one(spec)) for spec in specs)
        except asyncio.CancelledError:
            done = (task.result() for task in tasks if not task.cancelled())
            await self.release([result.id for result in done if not isinstance(result, SandboxError)])
            raise
        return [task.result() for task in tasks]

    async def lease_one(self, request: LeaseRequest) -> Lease:
        """Return a new sandbox, or the one that the holder has already leased with the same idempotency key.

        Raises SandboxError; a cancelled call leaves no sandbox."""
        return await self._pending.join(
            request.holder, request.spec.idempotency_key, lambda: self._lease(request), self._discard
        )

    async def _lease(self, request: LeaseRequest) -> Lease:
        spec = request.spec
        if spec.idempotency_key and (known := self._leases.table.find(request.holder, spec.idempotency_key)):
            return Lease(ref=known.ref)
        if (warm := await self._warm.take(request)) is not None:
            return Lease(ref=warm.ref, warm=True)
        try:
            lease = await self._booter.boot(request, request.priority)
        except SandboxError:
            self._totals.failed += 1
            raise
        self._totals.booted += 1
        return lease

    def _discard(self, lease: Lease) -> None:
        """End a lease that nobody is waiting for any more."""
        if (held := self._leases.table.get(lease.ref.id)) is not None:
            self._leases.end(held)

    async def release(self, ids: Iterable[SandboxId]) -> None:
        """Kill sandboxes and drop their layers. Each kill is attempted once; the reaper retries those that failed.
        Unknown ids are ignored. Idempotent."""
        await self._end([held for held in map(self._leases.table.get, ids) if held is not None])

    async def release_requests(self, request_keys: Iterable[str]) -> None:
        """Release the sandboxes that were leased under these idempotency keys, by any holder. Idempotent."""
        wanted = set(request_keys) - {""}
        await self._end([held for held in self._leases.table if held.request_key in wanted and not held.ending])

    async def _end(self, ending: Sequence[HeldSandbox]) -> None:
        for held in ending:
            self._leases.end(held)
        self._totals.released += len(ending)
        if ending:
            await asyncio.wait([self._teardown.start(held) for held in ending])

    async def release_holder(self, holder: str) -> None:
        """Release all sandboxes of a holder and cancel its boots. Idempotent."""
        await self._pending.cancel(holder)
        await self._end(self._leases.table.of_holder(holder))

    async def freeze(self, ids: Iterable[SandboxId]) -> list[SandboxError | None]:
        """Kill the processes but retain the files, and free the slots. Return an error or None for each id, in the
        order of the ids. Ids of sandboxes that are gone are ignored."""

        async def freeze_one(sandbox_id: SandboxId) -> SandboxError | None:
            held = self._leases.table.get(sandbox_id)
            if held is None or held.frozen:
                return None
            host = self._hosts[held.host]
            try:
                async with asyncio.timeout(self._config.answer_timeout_s):
                    sandbox = await host.provider.attach(held.ref)
                    await sandbox.freeze()
            except SandboxGone:
                self._lost(held)
                return None
            except SandboxError as error:
                return error
            except TimeoutError:
                return ProviderUnreachable(f"host {held.host} did not freeze sandbox {sandbox_id} in time")
            if not held.ending:
                held.frozen = True
                host.leave(held.ticket)
                # Nobody freezes it again: a pool that adopts it must know that it has no place.
                await self._leases.written(held)
            return None

        async with asyncio.TaskGroup() as group:
            freezing = [group.create_task(freeze_one(sandbox_id)) for sandbox_id in ids]
        return [task.result() for task in freezing]

    def _lost(self, held: HeldSandbox) -> None:
        was_ending = held.ending
        if self._teardown.forget(held) and not was_ending:
            self._totals.lost += 1

    async def renew(self, ids: Iterable[SandboxId], ttl_s: float) -> list[SandboxId]:
        """Make the leases end `ttl_s` seconds from now. Return the ids of sandboxes that are gone."""
        leased = {sandbox_id: self._leases.table.get(sandbox_id) for sandbox_id in ids}
        lost = [sandbox_id for sandbox_id, held in leased.items() if held is None]
        found = [held for held in leased.values() if held is not None]
        for held in found:
            self._leases.renew(held, asyncio.get_running_loop().time() + ttl_s)
        return lost + await self._renew_at_providers(found, ttl_s)

    async def renew_holder(self, holder: str, ttl_s: float) -> list[SandboxId]:
        """Renew all leases of a holder to at least `ttl_s` seconds from now. Return the ids of sandboxes that turn out
        to be gone."""
        renewed = self._leases.renew_holder(holder, asyncio.get_running_loop().time() + ttl_s)
        return await self._renew_at_providers(renewed, ttl_s)

    async def _renew_at_providers(self, renewed: Sequence[HeldSandbox], ttl_s: float) -> list[SandboxId]:
        async def is_alive(held: HeldSandbox) -> bool:
            # Other errors are ignored: a host that does not answer is asked again with the next heartbeat.
            with suppress(SandboxError, TimeoutError):
                try:
                    async with self._renewals, asyncio.timeout(self._config.answer_timeout_s):
                        sandbox = await self._hosts[held.host].provider.attach(held.ref)
                        await sandbox.renew(ttl_s)
                    held.dies_at_s = asyncio.get_running_loop().time() + ttl_s
                except SandboxGone:
                    self._lost(held)
                    return False
            return True

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(is_alive(held)) for held in renewed]
        return [held.ref.id for held, task in zip(renewed, tasks, strict=True) if not task.result()]

    async def status(self) -> PoolStatus:
        """Return the current counts, and totals since the pool started."""
        return status_of(
            self._hosts, self._leases.table, self._totals, self._booter, self._teardown, self._reaper, self._warm
        )


class _Closing(Exception):
    """Ends the background tasks of a pool."""


@asynccontextmanager
async def _background() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group that is cancelled when the block ends; a task that fails ends the block."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
            raise _Closing
    except* _Closing:
        pass


__all__ = ["EVALUATE", "PURPOSE_LABEL", "Pool", "PoolConfig", "PoolStatus"]


@dataclass(slots=True, eq=False)
class _Running:
    holder: str
    request_key: str
    task: asyncio.Task[Lease | Exception]
    waiters: int = 0


class PendingLeases:
    """Acquires leases in tasks of the group `tasks`, which run for as long as a caller waits: identical requests share
    one boot, and a holder's boots can be cancelled. A lease that becomes ready when no caller is waiting any more is
    passed to `discard`, never lost."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[_Running, None] = {}
        self._by_request: dict[tuple[str, str], _Running] = {}

    async def join(
        self, holder: str, request_key: str, begin: Callable[[], Awaitable[Lease]], discard: Callable[[Lease], None]
    ) -> Lease:
        """Wait for a request's lease, which `begin` acquires unless it is already pending. Raises the errors that
        `begin` raises, and SandboxGone if the holder has been released."""
        running = self._by_request.get((holder, request_key))
        if running is None:

            async def run() -> Lease | Exception:
                try:
                    return await begin()
                except Exception as error:  # noqa: BLE001 - belongs to the callers, not to the pool's task group
                    return error

            running = _Running(holder, request_key, self._tasks.create_task(run()))
            self._running[running] = None
            if request_key:
                self._by_request[holder, request_key] = running
            running.task.add_done_callback(partial(self._ended, running))
        running.waiters += 1
        try:
            await asyncio.wait([running.task])
        except asyncio.CancelledError:
            running.waiters -= 1
            if running.waiters == 0:
                # The next equal request begins a new boot. This one may be ready just now, or while it is cancelled.
                self._forget(running)
                running.task.cancel()

                def ended(task: asyncio.Task[Lease | Exception]) -> None:
                    if not task.cancelled() and not isinstance(result := task.result(), Exception):
                        discard(result)

                running.task.add_done_callback(ended)
            raise
        if running.task.cancelled():
            raise SandboxGone(f"the lease was cancelled: its holder {holder!r} was released")
        if isinstance(result := running.task.result(), Exception):
            raise result
        return result

    def _ended(self, running: _Running, _: asyncio.Task[Lease | Exception]) -> None:
        self._running.pop(running, None)
        self._forget(running)

    def _forget(self, running: _Running) -> None:
        name = (running.holder, running.request_key)
        if self._by_request.get(name) is running:
            del self._by_request[name]

    async def cancel(self, holder: str) -> None:
        """Cancel all pending leases of a holder; returns once they have ended."""
        await _end([running.task for running in self._running if running.holder == holder])

    async def cancel_all(self) -> None:
        await _end([running.task for running in self._running])


async def _end(tasks: list[asyncio.Task[Lease | Exception]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
