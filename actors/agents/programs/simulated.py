"""The simulated agent, which takes time instead of working; for virtual time, replays and measurements.

Invariants:
- A rollout's duration, the split of that duration into turns, and the rollout's failures depend only on the seed, the
  task, the rollout and the attempt.
- The agent runs one command in its sandbox (which does nothing in a simulated sandbox) and asks the engines for every
  turn. Simulated engines take the time of the turn; real engines answer through the gateway, and their time counts
  towards that of the turn.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Self

from pydantic import Field, model_validator

from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason
from headrace.actors.runtime.simulated.durations import Durations, DurationsConfig
from headrace.actors.runtime.simulated.tasks import is_solved
from headrace.actors.services.chat import ChatContextExceeded, ChatMessage
from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.slowdowns import Slowdown, Slowdowns, SlowKind, refuse_kinds
from headrace.buffer.tasks.evaluators import SimulatedEvaluator
from headrace.buffer.tasks.task import Task
from headrace.policies.errors import EngineUnavailable
from headrace.sandboxes.base import HostFolder, Sandbox
from headrace.sandboxes.errors import SandboxGone
from headrace.sandboxes.simulated.attached import AttachedSandbox

COMMAND_S = 10.0
TOKENS_PER_TURN = 8
TOOL_CPUS = 0.5
"""CPU seconds that a tool uses per second; one that a slowdown prolongs waits, for something or for a CPU."""


class SimulatedAgentConfig(Section):
    """Durations and failures of simulated rollouts."""

    durations: DurationsConfig = DurationsConfig()
    """Time that the agent takes from start to end, excluding pauses of the engines."""
    turns: int = Field(default=8, ge=1)
    """Number of turns in a rollout."""
    generating_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a turn's time that the engines take; tools take the rest."""
    failing_turns: float = Field(default=0.0, ge=0, le=1)
    """Probability that the engines fail a turn, which ends the rollout with outcome infra."""
    stuck_turns: float = Field(default=0.0, ge=0, le=1)
    """Probability that a turn never ends; the deadline of the agent then ends the rollout."""
    seed: int = 0
    """Random seed for durations, their split into turns, failing or stuck turns, tools and slowdowns."""
    tools: tuple[str, ...] = Field(default=("bash",), min_length=1)
    """Names of tools, one of which is drawn for each turn."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Planted slowdowns of the kinds `tool`, `cpu` and `retries`."""

    @model_validator(mode="after")
    def _can_be_slow(self) -> Self:
        refuse_kinds(self.slowdowns, (SlowKind.TOOL, SlowKind.CPU, SlowKind.RETRIES))
        for slowdown in self.slowdowns:
            if slowdown.tool and slowdown.tool not in self.tools:
                raise ValueError(
                    f"slowdowns: tool {slowdown.tool!r} does not exist; name one of {', '.join(self.tools)}, or none"
                )
        return self


class SimulatedAgent:
    """Agent that finishes after a fixed number of turns."""

    def __init__(self, config: SimulatedAgentConfig) -> None:
        self._config = config
        self._durations = Durations(config.durations, seed=config.seed)
        self._slowdowns = Slowdowns(config.slowdowns, seed=config.seed)

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Run all turns. Raises EngineUnavailable for a simulated turn that fails, SandboxGone for an attempt that a
        slowdown repeats, ChatFailed for a real turn that fails."""
        if session.simulated is None:
            return await self._converse(session, task)
        policy, config = session.simulated, self._config
        await sandbox.exec("true", timeout_s=COMMAND_S)
        fates = random.Random(f"fates {config.seed} {policy.key}")
        solved = False
        if isinstance(task.evaluator, SimulatedEvaluator):
            # The verdict of the simulated evaluator depends on the key alone, so it is known before the end.
            _, rollout_id, attempt = policy.key.rsplit(" ", 2)
            success = task.evaluator.verdict.success
            solved = is_solved(task, success, f"{rollout_id}.{attempt}")
        tools = random.Random(f"tools {config.seed} {policy.key}")
        lost = self._slowdowns.affects(SlowKind.RETRIES, task.id, policy.key)
        for number, turn_s in enumerate(self.turns_s(policy.key, solved=solved), start=1):
            if fates.random() < config.failing_turns:
                raise EngineUnavailable("a simulated turn failed (agent.simulated.failing_turns)")
            if fates.random() < config.stuck_turns:
                turn_s = math.inf
            await policy.turn(TOKENS_PER_TURN, turn_s * config.generating_share)
            tool = tools.choice(config.tools)
            tool_s = turn_s * (1 - config.generating_share)
            cpu_s = tool_s * TOOL_CPUS
            tool_s *= self._slowdowns.factor(SlowKind.TOOL, task.id, policy.key, tool=tool)
            if isinstance(sandbox, AttachedSandbox):
                waited_s = tool_s * (self._slowdowns.factor(SlowKind.CPU, sandbox.host, sandbox.id) - 1)
                sandbox.spend(cpu_s, waited_s)
                tool_s += waited_s
            await policy.use(tool, tool_s)
            if lost and number == config.turns:
                raise SandboxGone(f"a sandbox of task {task.id} was lost (slowdowns of kind retries)")
        return AgentReport(stop=StopReason.FINISHED, turns=config.turns)

    async def _converse(self, session: AgentSession, task: Task) -> AgentReport:
        """Take turns at the gateway. Durations depend on the session, which is different in every run."""
        messages = [ChatMessage(role="user", content=task.instruction)]
        clock = asyncio.get_running_loop().time
        for number, turn_s in enumerate(self.turns_s(f"{task.id} {session.base_url} 0"), start=1):
            began_s = clock()
            try:
                reply = await session.chat(messages)
            except ChatContextExceeded:
                return AgentReport(stop=StopReason.CONTEXT, turns=number - 1)
            messages.append(ChatMessage(role="assistant", content=reply.text))
            messages.append(ChatMessage(role="user", content=f"turn {number} is over"))
            await asyncio.sleep(max(0.0, began_s + turn_s - clock()))
        return AgentReport(stop=StopReason.FINISHED, turns=self._config.turns)

    def turns_s(self, key: str, *, solved: bool = False) -> list[float]:
        """Draw the duration of each turn of an attempt. `key`: task, rollout, attempt."""
        chance = random.Random(f"turns {self._config.seed} {key}")
        shares = [chance.uniform(0.5, 1.5) for _ in range(self._config.turns)]
        duration_s = self._durations.draw_s(key, task=key.rsplit(" ", 2)[0], solved=solved)
        whole = sum(shares)
        return [duration_s * share / whole for share in shares]
