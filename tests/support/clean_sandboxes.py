"""Clean sandboxes for the evaluator without a pool, for tests that score the sandbox of one agent."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef, SandboxSpec
    from headrace.sandboxes.local.provider import LocalProvider


class CleanSandboxes:
    """Clean sandboxes straight from the provider."""

    def __init__(self, provider: LocalProvider, agent_sandbox: Sandbox) -> None:
        self._provider = provider
        self._agent_sandbox = agent_sandbox

    async def freeze(self, sandbox: SandboxId) -> None:
        assert sandbox == self._agent_sandbox.id
        await self._agent_sandbox.freeze()

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        sandbox = await self._provider.attach(await self._provider.create(spec))
        try:
            yield sandbox
        finally:
            await sandbox.kill()

    @asynccontextmanager
    async def live(self, ref: SandboxRef) -> AsyncIterator[Sandbox]:
        yield await self._provider.attach(ref)
