"""The sandbox pool actor: `headrace.sandboxes.pool.Pool` over the provider of the recipe.

Invariant: what a dead worker leased is released by its holder's label; what nobody releases ends with its lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.actors.owning import Owning
from headrace.sandboxes.leftovers import run_label
from headrace.sandboxes.pool import Pool

if TYPE_CHECKING:
    from headrace.actors.config import SandboxSection
    from headrace.actors.run_directory import RunDirectory
    from headrace.sandboxes.base import SandboxId, SandboxProvider, SandboxRef, SandboxSpec
    from headrace.sandboxes.errors import SandboxError
    from headrace.sandboxes.pool import PoolStatus


class SandboxPool(Owning):
    """Leases, freezes and releases sandboxes of one host, in batches."""

    def __init__(self, section: SandboxSection, *, directory: RunDirectory) -> None:
        super().__init__()
        self._section = section
        self._label = run_label(directory.path)

    async def __aenter__(self) -> Self:
        self._provider = await _start(self._section, self._label)
        pool = Pool({self._section.provider.value: self._provider}, self._section.pool, owner=self._label)
        self._pool = await self._stack.enter_async_context(pool)
        return self

    async def lease(self, specs: list[SandboxSpec]) -> list[SandboxRef | SandboxError]:
        """One sandbox for each spec; errors are results, in the order of the specs."""
        return await self._pool.lease(specs)

    async def freeze(self, ids: list[SandboxId]) -> list[SandboxError | None]:
        """Freeze each; errors are results, in the order of the ids. What is already gone stays gone."""
        return await self._pool.freeze(ids)

    async def release(self, ids: list[SandboxId]) -> None:
        """Unknown ids are ignored; idempotent."""
        await self._pool.release(ids)

    async def release_holder(self, holder: str) -> None:
        """Release everything that one incarnation of a worker, or an evaluator, leased."""
        await self._pool.release_holder(holder)

    async def status(self) -> PoolStatus:
        return await self._pool.status()


async def _start(section: SandboxSection, label: str) -> SandboxProvider:
    from headrace.actors.config import SandboxKind
    from headrace.sandboxes.local import LocalProvider
    from headrace.sandboxes.unprotected import SubprocessProvider

    if section.provider is SandboxKind.SUBPROCESS:
        return SubprocessProvider(label=label)
    provider = LocalProvider(section.local.model_copy(update={"label": label}))
    await provider.start()
    return provider
