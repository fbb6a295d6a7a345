"""The agent that returns immediately, for measuring the orchestration around it (`scripts/bench orchestration`)."""

from __future__ import annotations

from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import HostFolder, Sandbox


class ImmediateAgent:
    """Agent that finishes before its first turn, so that nothing is sampled or trained."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        return AgentReport(stop=StopReason.FINISHED, turns=0)
