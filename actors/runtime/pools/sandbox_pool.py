"""The sandbox pool actor, which runs `sandboxes.pool.pool.Pool` over the provider of the recipe.

Invariants:
- Sandboxes that their holder does not renew end when their lease expires; those of a dead holder are released
  immediately.
- The pool's ledger is in the run directory: a restarted pool adopts or kills the sandboxes that are recorded in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Self

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory, sandbox_owner
from headrace.actors.runtime.actors.operations import NO_ATTEMPTS, Attempts, Operations, Results
from headrace.actors.runtime.pools.config import SandboxSection
from headrace.actors.runtime.pools.providers import start_hosts
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.sandboxes.base import SandboxId, SandboxProvider, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.local.provider import LocalProvider
from headrace.sandboxes.pool.boot import Lease, LeaseRequest
from headrace.sandboxes.pool.config import PoolConfig
from headrace.sandboxes.pool.ledger import SandboxLedger
from headrace.sandboxes.pool.pool import Pool, PoolStatus


class SandboxPool(ResourceOwner):
    """Actor that leases, freezes and releases sandboxes, in batches. Without a directory the ledger is kept in memory,
    which is allowed only for simulated sandboxes. `clock` returns Unix seconds; `provider` replaces the one in the
    section."""

    def __init__(
        self,
        section: SandboxSection,
        *,
        directory: RunDirectory | None,
        clock: Callable[[], float] = time.time,
        provider: SandboxProvider | None = None,
        observing: ActorTelemetry | None = None,
    ) -> None:
        super().__init__()
        self._observing = observing
        self._provider = provider
        self._section = section
        self._directory = directory
        self._clock = clock

    async def __aenter__(self) -> Self:
        if self._observing is not None:
            self._stack.enter_context(self._observing.spans("pool"))
        if self._directory is None:
            ledger = SandboxLedger()
        else:
            ledger = await asyncio.to_thread(SandboxLedger, self._directory.sandboxes)
        self._stack.callback(ledger.close)
        given = self._provider and {str(self._section.provider): self._provider}
        hosts = given or await start_hosts(self._section, self._directory)
        self._local = [host for host in hosts.values() if isinstance(host, LocalProvider)]
        label = "" if self._directory is None else sandbox_owner(self._directory)
        config = PoolConfig.model_validate(self._section.pool, from_attributes=True)
        enter = self._stack.enter_async_context
        self._pool = await enter(Pool(hosts, config, ledger=ledger, owner=label, clock=self._clock))
        self._leases: Operations[LeaseRequest, Lease] = await enter(
            Operations(self._pool.lease_one, unclaimed=self._release_unclaimed)
        )
        return self

    async def begin(self, requests: dict[str, LeaseRequest], attempts: Attempts = NO_ATTEMPTS) -> Results[Lease]:
        """Start the requested leases, which are identified by key; see `operations.Operator`."""
        return await self._leases.begin(requests, attempts)

    async def fetch(self, keys: list[str]) -> Results[Lease]:
        """Return leases as they become ready, or the SandboxError of each that failed."""
        return await self._leases.fetch(keys)

    async def withdraw(self, keys: list[str]) -> None:
        """Cancel leases and release their sandboxes: a restarted pool may have adopted sandboxes that its callers have
        abandoned in the meantime. Idempotent."""
        await self._leases.withdraw(keys)
        await self._pool.release_requests(keys)

    async def lease(self, specs: list[SandboxSpec]) -> list[SandboxRef | SandboxError]:
        """Lease one sandbox for each spec and wait for all of them. Returns a ref or an error for each spec, in
        order."""
        return await self._pool.lease(specs)

    async def freeze(self, ids: list[SandboxId]) -> list[SandboxError | None]:
        """Freeze sandboxes. Returns an error, or None, for each id, in order. Idempotent."""
        return await self._pool.freeze(ids)

    async def release(self, ids: list[SandboxId]) -> None:
        """Release sandboxes. Unknown ids are ignored; idempotent."""
        await self._pool.release(ids)

    async def renew_holder(self, holder: str, ttl_s: float) -> list[SandboxId]:
        """Extend all of a holder's leases to `ttl_s` seconds from now. Returns the sandboxes that are gone."""
        return await self._pool.renew_holder(holder, ttl_s)

    async def release_holder(self, holder: str) -> None:
        """Release all current and pending leases of a holder (an incarnation of a worker, or the evaluator)."""
        await self._pool.release_holder(holder)

    async def status(self) -> PoolStatus:
        return await self._pool.status()

    async def command_costs(self) -> dict[str, tuple[int, float]]:
        """Return the number and CPU seconds of commands in local sandboxes, by purpose and operation; see
        `LocalProvider.command_costs`."""
        return {name: cost for host in self._local for name, cost in (await host.command_costs()).items()}

    async def _release_unclaimed(self, lease: Lease) -> None:
        await self._pool.release([lease.ref.id])
