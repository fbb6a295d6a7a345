"""Sessions at simulated engines, in the process of the worker and without a gateway.

Invariants:
- A session has one row: a prompt, then turns with observations between them. Only sampled tokens are trained, with the
  versions that the engine reports.
- Only the engine takes time.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from headrace.actors.agents.agent import AgentSession
from headrace.actors.agents.chat import NoChat
from headrace.actors.runtime.resources import ResourceOwner
from headrace.actors.simulated.engines import EngineWatch
from headrace.buffer.types import Row, Trajectory, VersionSpan
from headrace.policies.learners.simulated import VOCABULARY
from headrace.serve.capture.events import Exhausted
from headrace.serve.capture.rows import Lineage, SessionReport
from headrace.serve.gateway.client import OpenedSession

if TYPE_CHECKING:
    from headrace.actors.simulated.engines import SimulatedEngineGroup
    from headrace.buffer.types import RolloutOrder
    from headrace.policies.engine import Completion
    from headrace.policies.learners.simulated import SimulatedEngine
    from headrace.serve.capture.session import SessionId, SessionSpec

PROMPT_TOKENS: Final = 8
OBSERVED_TOKENS: Final = 2
"""Tokens of an observation between two turns."""


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedSession:
    """Policy of one rollout; implements `agent.SimulatedPolicy`. `key` names the attempt."""

    key: str
    engine: SimulatedEngine
    temperature: float
    turns: list[Completion] = field(default_factory=list)

    async def turn(self, tokens: int, seconds: float) -> None:
        """Generate one answer of `tokens` tokens in `seconds` seconds."""
        first_id = zlib.crc32(f"{self.key} {len(self.turns)}".encode())
        self.turns.append(await self.engine.generate(tokens, seconds, first_id=first_id))

    def report(self, session_id: SessionId) -> SessionReport:
        ids, mask, logprobs = [0] * PROMPT_TOKENS, [False] * PROMPT_TOKENS, [0.0] * PROMPT_TOKENS
        spans: list[VersionSpan] = []
        for number, turn in enumerate(self.turns):
            observed = OBSERVED_TOKENS if number else 0
            ids += [number % VOCABULARY] * observed
            start = len(ids)
            ids += turn.output_ids
            mask += [False] * observed + [True] * len(turn.output_ids)
            logprobs += [0.0] * observed + list(turn.logprobs)
            spans += [span.shifted(start) for span in turn.spans]
        row = Row(
            tokens_T=np.array(ids, dtype=np.int32),
            loss_mask_T=np.array(mask, dtype=np.bool_),
            logprobs_T=np.array(logprobs, dtype=np.float32),
            versions=tuple(spans),
        )
        sampled = sum(len(turn.output_ids) for turn in self.turns)
        trajectory = Trajectory(rows=(row,), temperature=self.temperature) if sampled else None
        return SessionReport(
            session_id=session_id,
            trajectory=trajectory,
            turns=len(self.turns),
            sampled_tokens=sampled,
            trained_tokens=sampled,
            masked={},
            rerendered=0,
            exhausted=Exhausted.NONE,
            failures=(),
            lineages=(Lineage(name="0", truncated=False),) if sampled else (),
        )


class SimulatedSessions(ResourceOwner):
    """Implementation of `rollouts.sessions.Sessions` over simulated engines."""

    def __init__(self, group: SimulatedEngineGroup, worker: str) -> None:
        super().__init__()
        self._watch = EngineWatch(group, worker)
        self._sessions: dict[SessionId, SimulatedSession] = {}

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._watch)
        return self

    @property
    def turns(self) -> int:
        """Turns in progress."""
        return self._watch.engine.generating

    @property
    def ended_turns(self) -> int:
        return self._watch.engine.turns

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        await self._watch.begin()
        key = f"{order.task_id} {order.rollout_id} {order.attempt}"
        session = SimulatedSession(key=key, engine=self._watch.engine, temperature=spec.sampling.temperature)
        self._sessions[spec.session_id] = session
        return OpenedSession(session_id=spec.session_id, base_url="")

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        simulated = self._sessions[session.session_id]
        return AgentSession(base_url="", chat=NoChat(), context_tokens=context_tokens, simulated=simulated)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        report = self._sessions.pop(session.session_id).report(session.session_id)
        await self._watch.end()
        return report
