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
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.agents.agent import AgentReport, AgentSession, StopReason
from headrace.actors.chat import ChatContextExceeded, ChatMessage
from headrace.actors.simulated.durations import Durations, DurationsConfig
from headrace.actors.simulated.tasks import is_solved
from headrace.buffer.tasks import EvaluatorKind, SimulatedVerdict, Task
from headrace.policies.errors import EngineUnavailable

if TYPE_CHECKING:
    from headrace.sandboxes.base import HostFolder, Sandbox


COMMAND_S = 10.0


class SimulatedAgentConfig(BaseModel):
    """Durations and failures of simulated rollouts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    durations: DurationsConfig = DurationsConfig()
    """Time that the agent takes from start to end, excluding pauses of the engines."""
    turns: int = Field(default=8, ge=1)
    """Number of turns in a rollout."""
    tokens_per_turn: int = Field(default=8, ge=1)
    """Number of tokens sampled in one turn."""
    generating_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a turn's time that the engines take; tools take the rest."""
    failing_turns: float = Field(default=0.0, ge=0, le=1)
    """Probability that the engines fail a turn, which ends the rollout with outcome infra."""
    stuck_turns: float = Field(default=0.0, ge=0, le=1)
    """Probability that a turn never ends; the deadline of the agent then ends the rollout."""
    seed: int = 0
    """Random seed for durations, their split into turns, and failing or stuck turns."""


class SimulatedAgent:
    """Agent that finishes after a fixed number of turns."""

    def __init__(self, config: SimulatedAgentConfig) -> None:
        self._config = config
        self._durations = Durations(config.durations, seed=config.seed)

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Run all turns. Raises EngineUnavailable for a simulated turn that fails, ChatFailed for a real one."""
        if session.simulated is None:
            return await self._converse(session, task)
        policy, config = session.simulated, self._config
        await sandbox.exec("true", timeout_s=COMMAND_S)
        fates = random.Random(f"fates {config.seed} {policy.key}")
        solved = False
        if task.evaluator.kind is EvaluatorKind.SIMULATED:
            # The verdict of the simulated evaluator depends on the key alone, so it is known before the end.
            _, rollout_id, attempt = policy.key.rsplit(" ", 2)
            success = SimulatedVerdict.parse(task.evaluator.expected).success
            solved = is_solved(task, success, f"{rollout_id}.{attempt}")
        for turn_s in self.turns_s(policy.key, solved=solved):
            if fates.random() < config.failing_turns:
                raise EngineUnavailable("a simulated turn failed (agent.simulated.failing_turns)")
            if fates.random() < config.stuck_turns:
                turn_s = math.inf
            await policy.turn(config.tokens_per_turn, turn_s * config.generating_share)
            await asyncio.sleep(turn_s * (1 - config.generating_share))
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
