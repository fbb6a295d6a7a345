"""What the worker asks of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.actors.agents.shell import AgentReport, Chat
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox


class Agent(Protocol):
    """Works on one task; holds no state between runs; picklable."""

    async def run(self, *, chat: Chat, sandbox: Sandbox, task: Task) -> AgentReport:
        """Raises what the gateway or the sandbox raises: the caller classifies it."""
        ...
