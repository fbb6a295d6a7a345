"""One holder's sandbox leases, with batched calls to the pool.

Invariants:
- Leased sandboxes have the label of the holder and a short lease, which its heartbeat renews: a holder that dies or
  hangs loses its sandboxes within `lease_s`.
- Every lease gets exactly one new sandbox, no matter how often the call is repeated; a lease that is cancelled while
  booting is released.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Final, Self

from opentelemetry.util.types import AttributeValue

from headrace.actors.errors import ActorGone
from headrace.actors.runtime.actors.batching import Batcher
from headrace.actors.runtime.actors.operations import OperationCalls, until_back
from headrace.actors.runtime.pools.providers import attaching_provider
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.sandboxes.base import Sandbox, SandboxId, SandboxProvider, SandboxRef
from headrace.sandboxes.pool.boot import HOLDER_LABEL, Lease, LeaseRequest
from headrace.serve.tracing import span_names

LEASE_S: Final = 60.0
"""Lease term, which is longer than a pool takes to restart."""
HEARTBEATS: Final = 4
"""Heartbeats per lease term."""


def lease_attributes(lease: Lease) -> dict[str, AttributeValue]:
    """Return the attributes of the span that waited for a lease."""
    return {
        span_names.SANDBOX_HOST: lease.ref.host,
        span_names.SANDBOX_ID: str(lease.ref.id),
        span_names.SANDBOX_WARM: lease.warm,
        span_names.SANDBOX_TRIES: lease.tries,
        span_names.QUEUE_S: lease.queue_s,
    }


class SandboxConnections(ResourceOwner):
    """Providers of all kinds that attach to running sandboxes, with one connection per launcher; closing them does not
    end any sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self._providers: dict[str, SandboxProvider] = {}

    async def __aenter__(self) -> Self:
        return self

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Attach to the sandbox that a ref names. Raises SpecRefused for an unknown provider."""
        provider = self._providers.get(ref.provider)
        if provider is None:
            provider = self._providers[ref.provider] = attaching_provider(ref.provider)
            self._stack.push_async_callback(provider.aclose)
        return await provider.attach(ref)


class Leases(ResourceOwner):
    """One holder's leases, as an async context manager."""

    def __init__(self, pool: SandboxPool, holder: str, *, lease_s: float = LEASE_S) -> None:
        super().__init__()
        self._pool = pool
        self._holder = holder
        self._lease_s = lease_s
        self._leased: set[SandboxId] = set()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._attachments = await enter(SandboxConnections())
        self._release: Batcher[SandboxId, None] = await enter(Batcher(self._release_many))
        self._lease: OperationCalls[LeaseRequest, Lease] = await enter(
            OperationCalls(self._pool, unclaimed=self._release_unclaimed)
        )
        tasks = await enter(asyncio.TaskGroup())
        self._stack.callback(tasks.create_task(self._beat()).cancel)
        return self

    async def lease(self, request: LeaseRequest) -> Lease:
        """Lease a new sandbox. Raises SandboxError, ActorGone."""
        key = f"{request.spec.idempotency_key}.{uuid.uuid4().hex}"
        labels = {**request.spec.labels, HOLDER_LABEL: self._holder}
        spec = replace(request.spec, labels=labels, idempotency_key=key, ttl_s=self._lease_s)
        lease = await self._lease(key, replace(request, spec=spec))
        self._leased.add(lease.ref.id)
        return lease

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._attachments.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        self._leased.discard(sandbox)
        await self._release(sandbox)

    async def _beat(self) -> None:
        """Renew all leases forever. Users of a lost sandbox notice the loss themselves."""
        while True:
            await asyncio.sleep(self._lease_s / HEARTBEATS)
            if not self._leased:
                continue
            try:
                await until_back(lambda: self._pool.renew_holder(self._holder, self._lease_s))
            except ActorGone:
                continue

    async def _release_unclaimed(self, lease: Lease) -> None:
        await self._release(lease.ref.id)

    async def _release_many(self, ids: list[SandboxId]) -> list[None]:
        await until_back(lambda: self._pool.release(ids))
        return [None] * len(ids)
