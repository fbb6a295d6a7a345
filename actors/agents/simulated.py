"""An agent that takes time instead of working: for virtual time, replays and measuring the orchestration.

Invariants:
- How long a rollout takes, how that is split over its turns, and whether it fails, depends on seed, task, rollout and
  attempt alone.
- It runs one command in its sandbox, which does nothing in a simulated one, and asks the engines for every turn:
  simulated ones for the time of it, real ones through its session at the gateway, for an answer that counts towards the
  time of the turn.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.agents.agent import AgentReport, StopReason
from headrace.actors.agents.chat import ChatContextExceeded, ChatMessage
from headrace.actors.simulated.durations import Durations, DurationsConfig
from headrace.actors.simulated.tasks import is_solved
from headrace.buffer.tasks import EvaluatorKind, SimulatedVerdict
from headrace.policies.errors import EngineUnavailable

if TYPE_CHECKING:
    from headrace.actors.agents.agent import AgentSession
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import HostFolder, Sandbox


COMMAND_S = 10.0


class SimulatedAgentConfig(BaseModel):
    """How long simulated rollouts take, and of what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    durations: DurationsConfig = DurationsConfig()
    """The agent's time from its start to its end, while engines are not paused."""
    turns: int = Field(default=8, ge=1)
    """Turns of a rollout."""
    tokens_per_turn: int = Field(default=8, ge=1)
    """Tokens that one turn samples."""
    generating_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a turn's time that the engines take; the rest is the tool's."""
    failing_turns: float = Field(default=0.0, ge=0, le=1)
    """Chance that the engines fail a turn, which ends the rollout as infra."""
    stuck_turns: float = Field(default=0.0, ge=0, le=1)
    """Chance that a turn never ends; the deadline of the agent ends its rollout."""
    seed: int = 0
    """Of the durations, their split, and which turns fail or are stuck."""


class SimulatedAgent:
    """Finishes after its turns."""

    def __init__(self, config: SimulatedAgentConfig) -> None:
        self._config = config
        self._durations = Durations(config.durations, seed=config.seed)

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Raises EngineUnavailable for a simulated turn that fails, ChatFailed for a real one."""
        if session.simulated is None:
            return await self._converse(session, task)
        policy, config = session.simulated, self._config
        await sandbox.exec("true", timeout_s=COMMAND_S)
        fates = random.Random(f"fates {config.seed} {policy.key}")
        for turn_s in self.turns_s(policy.key, solved=_solves(task, policy.key)):
            if fates.random() < config.failing_turns:
                raise EngineUnavailable("a simulated turn failed (agent.simulated.failing_turns)")
            if fates.random() < config.stuck_turns:
                turn_s = math.inf
            await policy.turn(config.tokens_per_turn, turn_s * config.generating_share)
            await asyncio.sleep(turn_s * (1 - config.generating_share))
        return AgentReport(stop=StopReason.FINISHED, turns=config.turns)

    async def _converse(self, session: AgentSession, task: Task) -> AgentReport:
        """Turns at the gateway. Which of them are slow depends on the session, which is another one in every run."""
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
        """The duration of an attempt, split over its turns by a draw of its own. `key`: task, rollout, attempt."""
        chance = random.Random(f"turns {self._config.seed} {key}")
        shares = [chance.uniform(0.5, 1.5) for _ in range(self._config.turns)]
        duration_s = self._durations.draw_s(key, task=key.rsplit(" ", 2)[0], solved=solved)
        whole = sum(shares)
        return [duration_s * share / whole for share in shares]


def _solves(task: Task, key: str) -> bool:
    """What the simulated evaluator will say of this attempt; other evaluators look at what it left."""
    if task.evaluator.kind is not EvaluatorKind.SIMULATED:
        return False
    _, rollout_id, attempt = key.rsplit(" ", 2)
    return is_solved(task, SimulatedVerdict.parse(task.evaluator.expected).success, f"{rollout_id}.{attempt}")
