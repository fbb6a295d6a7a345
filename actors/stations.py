"""Where the rollouts of one worker go: pool, policy, agent, evaluator; calls that can travel together do.

Invariant: each incarnation of a worker is a holder of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.actors.leases import Leases
from headrace.actors.operations import OperationCalls
from headrace.actors.owning import Owning
from headrace.actors.sessions import GatewaySessions, NoSessions
from headrace.actors.simulation.sessions import SimulatedSessions
from headrace.serve.capture.session import SessionId, SessionSpec

if TYPE_CHECKING:
    from headrace.actors.agents.agent import AgentReport
    from headrace.actors.evaluators.evaluation import EvaluationRequest, Verdict
    from headrace.actors.sessions import Sessions
    from headrace.actors.worker import WorkerParts
    from headrace.buffer.types import RolloutOrder
    from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef
    from headrace.sandboxes.pool.booting import Lease, LeaseRequest
    from headrace.serve.capture.rows import SessionReport
    from headrace.serve.client import OpenedSession


class WorkerStations(Owning):
    """The stations of `rollout.Stations` over actors; an async context manager."""

    def __init__(self, parts: WorkerParts, holder: str) -> None:
        super().__init__()
        self._parts = parts
        self._holder = holder

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._sessions: Sessions = await enter(_sessions_of(self._parts, self._holder))
        self._leases = await enter(Leases(self._parts.pool, self._holder, lease_s=self._parts.rollout.lease_s))
        self._evaluate: OperationCalls[EvaluationRequest, Verdict] = await enter(
            OperationCalls(self._parts.evaluator, unclaimed=_nothing_to_give_back)
        )
        return self

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return self._parts.agent.folders

    async def lease(self, request: LeaseRequest) -> Lease:
        return await self._leases.lease(request)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._leases.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        await self._leases.release(sandbox)

    async def open_session(self, order: RolloutOrder, traceparent: str) -> OpenedSession:
        terms = self._parts.terms(order.purpose)
        spec = SessionSpec(
            # With the incarnation: a session of a dead worker may still be open when its evaluation runs again.
            session_id=SessionId(f"{order.rollout_id}.{order.attempt}.{self._holder[:8]}"),
            sampling=terms.sampling,
            budgets=terms.budgets,
            traceparent=traceparent,
            train_truncated=self._parts.train_truncated,
        )
        return await self._sessions.open(order, spec)

    async def run_agent(self, order: RolloutOrder, sandbox: Sandbox, session: OpenedSession) -> AgentReport:
        context_tokens = self._parts.terms(order.purpose).budgets.max_context_tokens
        given = self._sessions.given(session, context_tokens=context_tokens)
        return await self._parts.agent.run(session=given, sandbox=sandbox, task=order.task)

    async def finish_session(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        return await self._sessions.finish(session, conversation=conversation)

    @property
    def turns(self) -> int | None:
        """Under way at simulated engines, None at others."""
        return self._sessions.turns if isinstance(self._sessions, SimulatedSessions) else None

    @property
    def ended_turns(self) -> int | None:
        """Turns that ended at simulated engines, None at others."""
        return self._sessions.ended_turns if isinstance(self._sessions, SimulatedSessions) else None

    async def evaluate(self, request: EvaluationRequest) -> Verdict:
        # With the sandbox: an attempt that a reset worker runs again is another evaluation.
        return await self._evaluate(f"{request.key}.{request.sandbox.id}", request)


def _sessions_of(parts: WorkerParts, holder: str) -> Sessions:
    if parts.simulated_engines is not None:
        return SimulatedSessions(parts.simulated_engines, holder)
    return GatewaySessions(parts.gateway) if parts.gateway is not None else NoSessions()


async def _nothing_to_give_back(_: Verdict) -> None:
    """A verdict holds nothing."""
