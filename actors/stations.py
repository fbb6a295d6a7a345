"""Where the rollouts of one worker go: pool, gateway, agent, evaluator; calls that can travel together do.

Invariant: each incarnation of a worker is a holder of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from headrace.actors.agents.agent import AgentSession
from headrace.actors.agents.chat import ChatClient
from headrace.actors.leases import Leases
from headrace.actors.operations import OperationCalls
from headrace.actors.owning import Owning
from headrace.serve.capture.session import Session, SessionId, SessionSpec
from headrace.serve.client import GatewayClient, OpenedSession
from headrace.serve.errors import GatewayUnreachable, SessionUnknown

if TYPE_CHECKING:
    from headrace.actors.agents.agent import AgentReport
    from headrace.actors.evaluators.evaluation import EvaluationRequest, Verdict
    from headrace.actors.worker import WorkerParts
    from headrace.buffer.types import RolloutOrder
    from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef
    from headrace.sandboxes.pool.booting import Lease, LeaseRequest
    from headrace.serve.capture.rows import SessionReport


class WorkerStations(Owning):
    """The stations of `rollout.Stations` over actors and HTTP; an async context manager."""

    def __init__(self, parts: WorkerParts, holder: str) -> None:
        super().__init__()
        self._parts = parts
        self._holder = holder

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._http = await enter(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        address = self._parts.gateway
        self._gateway = await enter(GatewayClient(address.url, address.admin_token)) if address else None
        self._leases = await enter(Leases(self._parts.pool, self._holder))
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
        spec = SessionSpec(
            # With the incarnation: a session of a dead worker may still be open when its evaluation runs again.
            session_id=SessionId(f"{order.rollout_id}.{order.attempt}.{self._holder[:8]}"),
            sampling=self._parts.sampling,
            budgets=self._parts.budgets,
            traceparent=traceparent,
            train_truncated=self._parts.train_truncated,
        )
        if self._gateway is None:
            return OpenedSession(session_id=spec.session_id, base_url="")
        return await self._open_session(self._gateway, spec)

    @staticmethod
    async def _open_session(gateway: GatewayClient, spec: SessionSpec) -> OpenedSession:
        """Wait for a gateway that is restarting: a rollout that fails at once would be issued again at once, and be
        poison before the gateway is back. The phase's deadline ends the waiting."""
        opened: list[OpenedSession] = await _until_reached()(gateway.open, [spec])
        return opened[0]

    async def run_agent(self, order: RolloutOrder, sandbox: Sandbox, session: OpenedSession) -> AgentReport:
        given = AgentSession(
            base_url=session.base_url,
            chat=ChatClient(self._http, session.base_url),
            context_tokens=self._parts.budgets.max_context_tokens,
        )
        return await self._parts.agent.run(session=given, sandbox=sandbox, task=order.task)

    async def finish_session(self, session: OpenedSession) -> SessionReport:
        if self._gateway is None:
            return Session(SessionSpec(session_id=session.session_id), opened_at=0.0).report()
        # A gateway that restarts knows its sessions again, also those it had finished when its answer was lost.
        reports: list[SessionReport | SessionUnknown] = await _until_reached()(
            self._gateway.finish, [session.session_id]
        )
        if isinstance(reports[0], SessionUnknown):
            raise reports[0]
        return reports[0]

    async def evaluate(self, request: EvaluationRequest) -> Verdict:
        # With the sandbox: an attempt that a reset worker runs again is another evaluation.
        return await self._evaluate(f"{request.key}.{request.sandbox.id}", request)


def _until_reached() -> AsyncRetrying:
    """Again while the gateway is away; not when it refuses."""
    return AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, GatewayUnreachable) and not error.answered),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
    )


async def _nothing_to_give_back(_: Verdict) -> None:
    """A verdict holds nothing."""
