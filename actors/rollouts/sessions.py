"""Sessions of rollouts with the policy, through the gateway or, for simulated engines, without one.

Invariants:
- A session is opened once per attempt and worker incarnation, and is finished once.
- A simulated session has one row: a prompt, then turns with observations between them. Only sampled tokens are trained,
  with the versions that the engine reports.
- Only generation on the simulated engines, waiting for them, and simulated tools take time; a session reports that time
  as a gateway does.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Protocol, Self

import aiohttp
import numpy as np
from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from headrace.actors.agents.programs.agent import AgentSession
from headrace.actors.runtime.actors.nodes import this_node
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.simulated.engines import EngineWatch, SimulatedEngineGroup
from headrace.actors.services.chat import ChatClient, NoChat
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.trajectories.breakdown import GATE
from headrace.buffer.trajectories.types import RolloutOrder, Row, Trajectory, VersionSpan
from headrace.policies.engine import Completion
from headrace.policies.learners.simulated import VOCABULARY, SimulatedEngine
from headrace.serve.gateway.capture.events import Exhausted
from headrace.serve.gateway.capture.rows import Lineage, SessionReport, report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.conversation import ToolCall
from headrace.serve.gateway.errors import GatewayUnreachable
from headrace.serve.gateway.http.client import GatewayClient, OpenedSession
from headrace.serve.gateway.http.placement import place_of


class Sessions(Protocol):
    """Sessions of one worker, as an async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession: ...

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        """Return the session in the form that the agent receives."""

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        """Finish a session. If `conversation` is set, the report includes the text of all turns."""


class GatewaySessions(ResourceOwner):
    """Sessions at gateways, over HTTP; the id of a session says which one has it. They are asked for their tokens,
    which are in no argument: Ray stores those."""

    def __init__(self, gateways: Sequence[GatewayActor]) -> None:
        super().__init__()
        self._actors = gateways
        self._gateways: list[GatewayClient] = []

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._http = await enter(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        for actor in self._actors:
            address = await until_back(actor.address)
            self._gateways.append(await enter(GatewayClient(address.url, address.admin_token)))
        return self

    def _gateway_of(self, session_id: SessionId) -> GatewayClient:
        return self._gateways[place_of(session_id, len(self._gateways))]

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        """Open a session. Waits for a restarting gateway until the deadline of the phase: a rollout that failed
        immediately would be reissued immediately, and would be declared poison before the gateway is back."""
        opened: OpenedSession = await _until_reached()(self._gateway_of(spec.session_id).open, spec)
        place = place_of(spec.session_id, len(self._gateways))
        node = this_node()[:12]
        return replace(opened, gateway=f"{node}/gateway-{place}" if node else f"gateway-{place}")

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        chat = ChatClient(self._http, session.base_url)
        return AgentSession(base_url=session.base_url, chat=chat, context_tokens=context_tokens)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        # A restarted gateway recovers its sessions, including finished ones whose answer was lost.
        gateway = self._gateway_of(session.session_id)
        return await _until_reached()(gateway.finish, session.session_id, conversation=conversation)


class NoSessions(ResourceOwner):
    """Sessions for agents that use no policy."""

    async def __aenter__(self) -> Self:
        return self

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        return OpenedSession(session_id=spec.session_id, base_url="")

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        return AgentSession(base_url="", chat=NoChat(), context_tokens=context_tokens)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        return report_of(Session(SessionSpec(session_id=session.session_id), opened_at=0.0))


def _until_reached() -> AsyncRetrying:
    """Return a retry policy for a gateway that does not answer; refusals are not retried."""
    return AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, GatewayUnreachable) and not error.answered),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
    )


PROMPT_TOKENS: Final = 8
OBSERVED_TOKENS: Final = 2
"""Number of tokens in an observation between two turns."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedSession:
    """Simulated policy of one rollout; implements `agent.SimulatedPolicy`. `key` names the attempt. Its time is counted
    from `since_s`, by default from its creation."""

    key: str
    engine: SimulatedEngine
    temperature: float
    since_s: float = field(default_factory=_now_s)
    turns: list[Completion] = field(default_factory=list)
    _usage: UsageClock = field(init=False)
    _context_tokens: int = PROMPT_TOKENS

    def __post_init__(self) -> None:
        self._usage = UsageClock(since_s=self.since_s)
        self._usage.add(GATE, self.since_s, _now_s())

    async def turn(self, tokens: int, seconds: float) -> None:
        """Generate one answer of `tokens` tokens in `seconds` seconds."""
        first_id = zlib.crc32(f"{self.key} {len(self.turns)}".encode())
        began_s = _now_s()
        generated = await self.engine.generate(tokens, seconds, first_id=first_id, session=self.key)
        # An engine has cached the whole conversation up to the last answer.
        cached_tokens = self._context_tokens if self.turns else 0
        prompt_tokens = self._context_tokens + (OBSERVED_TOKENS if self.turns else 0)
        completion = replace(generated.completion, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        turn = self._usage.next_turn()
        self._usage.called(generated.engine, completion, began_s, _now_s(), held_s=generated.held_s, turn=turn)
        self._context_tokens = prompt_tokens + len(completion.output_ids)
        self.turns.append(completion)

    async def use(self, tool: str, seconds: float) -> None:
        """Let a tool take `seconds` seconds."""
        began_s = _now_s()
        await asyncio.sleep(seconds)
        self._usage.tool((ToolCall("", tool, ""),), began_s, _now_s(), turn=len(self.turns))

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
            usage=self._usage.usage(_now_s()),
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
        """Number of turns in progress."""
        return self._watch.engine.generating

    @property
    def ended_turns(self) -> int:
        return self._watch.engine.turns

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        asked_s = _now_s()
        await self._watch.begin()
        key = f"{order.task_id} {order.rollout_id} {order.attempt}"
        session = SimulatedSession(
            key=key, engine=self._watch.engine, temperature=spec.sampling.temperature, since_s=asked_s
        )
        self._sessions[spec.session_id] = session
        return OpenedSession(session_id=spec.session_id, base_url="")

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        simulated = self._sessions[session.session_id]
        return AgentSession(base_url="", chat=NoChat(), context_tokens=context_tokens, simulated=simulated)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        report = self._sessions.pop(session.session_id).report(session.session_id)
        await self._watch.end()
        return report
