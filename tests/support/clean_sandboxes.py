"""Clean sandboxes for the evaluator without a pool, for tests that score the sandbox of one agent."""

from __future__ import annotations

from headrace.actors.cli.held_out.task_check import ProviderSandboxes
from headrace.sandboxes.base import Sandbox, SandboxId
from headrace.sandboxes.local.provider import LocalProvider


class CleanSandboxes(ProviderSandboxes):
    """Clean sandboxes that check which sandbox is frozen."""

    def __init__(self, provider: LocalProvider, agent_sandbox: Sandbox) -> None:
        super().__init__(provider, agent_sandbox)
        self._agent_sandbox = agent_sandbox

    async def freeze(self, sandbox: SandboxId) -> None:
        assert sandbox == self._agent_sandbox.id
        await super().freeze(sandbox)
