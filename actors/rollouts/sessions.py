"""Sessions of rollouts at the policy: opened and finished at the gateway, or without one.

Invariant: a session is opened once per attempt and incarnation of a worker, and finished once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from headrace.actors.agents.agent import AgentSession
from headrace.actors.agents.chat import ChatClient, NoChat
from headrace.actors.runtime.resources import ResourceOwner
from headrace.serve.capture.rows import report_of
from headrace.serve.capture.session import Session, SessionSpec
from headrace.serve.errors import GatewayUnreachable, SessionUnknown
from headrace.serve.gateway.client import GatewayClient, OpenedSession

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.actors.places.gateway import GatewayAddress
    from headrace.buffer.types import RolloutOrder
    from headrace.serve.capture.rows import SessionReport


class Sessions(Protocol):
    """Sessions of one worker, as an async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession: ...

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        """Return the session as the agent sees it."""
        ...

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        """Finish a session. With `conversation`, the report has every turn as text, if there are any."""
        ...


class GatewaySessions(ResourceOwner):
    """Sessions at a gateway, over HTTP."""

    def __init__(self, address: GatewayAddress) -> None:
        super().__init__()
        self._address = address

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._http = await enter(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        self._gateway = await enter(GatewayClient(self._address.url, self._address.admin_token))
        return self

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        """Open a session. Waits for a restarting gateway until the deadline of the phase: a rollout that failed at once
        would be reissued at once, and be poison before the gateway is back."""
        opened: list[OpenedSession] = await _until_reached()(self._gateway.open, [spec])
        return opened[0]

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        chat = ChatClient(self._http, session.base_url)
        return AgentSession(base_url=session.base_url, chat=chat, context_tokens=context_tokens)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        # A restarted gateway recovers its sessions, including finished ones whose answer was lost.
        reports: list[SessionReport | SessionUnknown] = await _until_reached()(
            self._gateway.finish, [session.session_id], conversation=conversation
        )
        if isinstance(reports[0], SessionUnknown):
            raise reports[0]
        return reports[0]


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
    """Return a retry policy for a gateway that does not answer; refusals are final."""
    return AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, GatewayUnreachable) and not error.answered),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
    )
