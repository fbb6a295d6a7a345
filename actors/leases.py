"""Sandboxes of one holder: leased, attached and released from its process, in batch calls to the pool.

Invariants:
- What is leased carries the holder's label, so that the leases of a dead holder can be released by it.
- A sandbox whose lease was cancelled while it booted is released.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from headrace.actors.attachments import Attachments
from headrace.actors.batching import Batcher
from headrace.actors.owning import Owning
from headrace.actors.retry import until_back
from headrace.sandboxes.booting import HOLDER_LABEL

if TYPE_CHECKING:
    from headrace.actors.sandbox_pool import SandboxPool
    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef, SandboxSpec
    from headrace.sandboxes.errors import SandboxError


class Leases(Owning):
    """The pool as one holder uses it; an async context manager."""

    def __init__(self, pool: SandboxPool, holder: str) -> None:
        super().__init__()
        self._pool = pool
        self._holder = holder

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._attachments = await enter(Attachments())
        self._release: Batcher[SandboxId, None] = await enter(Batcher(self._release_many))
        self._lease: Batcher[SandboxSpec, SandboxRef] = await enter(
            Batcher(self._lease_many, unclaimed=self._release_unclaimed)
        )
        return self

    async def lease(self, spec: SandboxSpec) -> SandboxRef:
        return await self._lease(replace(spec, labels={**spec.labels, HOLDER_LABEL: self._holder}))

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._attachments.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        await self._release(sandbox)

    async def _lease_many(self, specs: list[SandboxSpec]) -> list[SandboxRef | SandboxError]:
        return await until_back(lambda: self._pool.lease(specs))

    async def _release_unclaimed(self, ref: SandboxRef) -> None:
        await self._release(ref.id)

    async def _release_many(self, ids: list[SandboxId]) -> list[None]:
        await until_back(lambda: self._pool.release(ids))
        return [None] * len(ids)
