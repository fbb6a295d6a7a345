"""The quickstart's agent with a long last tool call, which makes its rollouts stale. For `scripts/bench staleness`."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from headrace.actors.agents.programs.agent import AgentReport, AgentSession
from headrace.actors.agents.registry.config import ShellAgentConfig
from headrace.actors.agents.registry.registry import shell_agent
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox

LONGEST: Final = 3.0
"""Longest last call, as a multiple of the mean one."""


class LateShell:
    """A shell agent whose last tool call takes `mean_s` seconds on average, exponentially distributed."""

    folders = ()

    def __init__(self, *, mean_s: float) -> None:
        self._agent = shell_agent(ShellAgentConfig())
        self._mean_s = mean_s

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        report = await self._agent.run(session=session, sandbox=sandbox, task=task)
        await asyncio.sleep(min(random.expovariate(1 / self._mean_s), LONGEST * self._mean_s))
        return report
