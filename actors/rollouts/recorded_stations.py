"""Stations of an evaluation rollout that record the reports of its agent, session and evaluator.

Invariant: recording does not change the rollout; the gateway and the evaluator only report more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from headrace.actors.agents.programs.agent import AgentReport
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict
from headrace.actors.rollouts.rollout import Stations
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.types import RolloutOrder
from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef
from headrace.sandboxes.pool.boot import Lease, LeaseRequest
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.http.client import OpenedSession

MAX_RESULT_CHARACTERS, MAX_COMMANDS = 4000, 1000


@dataclass(slots=True)
class RolloutReports:
    """Reports of the agent, the session and the evaluator; None for parts that the rollout did not reach."""

    agent: AgentReport | None = None
    session: SessionReport | None = None
    verdict: Verdict | None = None

    def metadata(self) -> dict[str, Any]:
        """Return the fields of metadata.json other than those of the answer."""
        metadata: dict[str, Any] = {}
        if self.agent is not None:
            metadata["agent"] = {
                "stop": self.agent.stop.value,
                "exit_code": self.agent.exit_code,
                "result": self.agent.result[:MAX_RESULT_CHARACTERS],
                "log_tail": self.agent.log_tail[-MAX_RESULT_CHARACTERS:],
                "commands": list(self.agent.commands[:MAX_COMMANDS]),
            }
        if self.agent is not None and self.agent.judgement is not None:
            metadata["judge"] = json.loads(self.agent.judgement.artifact())
        if self.session is not None:
            metadata["session"] = {
                "session_id": self.session.session_id,
                "turns": self.session.turns,
                "sampled_tokens": self.session.sampled_tokens,
                "masked": dict(self.session.masked),
                "rows": len(self.session.lineages),
                "exhausted": self.session.exhausted.value,
                "failures": list(self.session.failures),
            }
        if self.verdict is not None and self.verdict.parts:
            metadata["reward_parts"] = {
                name: {"reward": reward, "weight": weight} for name, (reward, weight) in self.verdict.parts.items()
            }
        return metadata


class RecordedStations:
    """Implementation of `rollout.Stations` that stores the reports in `reports`."""

    def __init__(self, stations: Stations) -> None:
        self._stations = stations
        self.reports = RolloutReports()

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return self._stations.folders

    async def lease(self, request: LeaseRequest) -> Lease:
        return await self._stations.lease(request)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._stations.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        await self._stations.release(sandbox)

    @property
    def agent_name(self) -> str:
        return self._stations.agent_name

    @property
    def needs_sandbox(self) -> bool:
        return self._stations.needs_sandbox

    @property
    def keeps_time(self) -> bool:
        return self._stations.keeps_time

    async def open_session(self, order: RolloutOrder, task: Task, traceparent: str) -> OpenedSession:
        return await self._stations.open_session(order, task, traceparent)

    async def finish_session(self, session: OpenedSession, *, conversation: bool = True) -> SessionReport:
        self.reports.session = await self._stations.finish_session(session, conversation=conversation)
        return self.reports.session

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox | None, session: OpenedSession, agent_s: float
    ) -> AgentReport:
        self.reports.agent = await self._stations.run_agent(order, task, sandbox, session, agent_s)
        return self.reports.agent

    async def evaluate(self, task: Task, request: EvaluationRequest) -> Verdict:
        self.reports.verdict = await self._stations.evaluate(task, replace(request, keep=True))
        return self.reports.verdict
