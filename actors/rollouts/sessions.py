"""The policy of one rollout: where its session is opened, what the agent gets of it, and what it leaves.

Invariant: a session is opened once for each attempt of each incarnation of a worker, and finished once.
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
    """An async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession: ...

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        """What the agent gets."""
        ...

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        """With `conversation`, the report holds every turn as text, where there is any."""
        ...


class GatewaySessions(ResourceOwner):
    """Sessions of a gateway, over HTTP."""

    def __init__(self, address: GatewayAddress) -> None:
        super().__init__()
        self._address = address

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._http = await enter(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        self._gateway = await enter(GatewayClient(self._address.url, self._address.admin_token))
        return self

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        """Wait for a gateway that is restarting: a rollout that fails at once would be issued again at once, and be
        poison before the gateway is back. The phase's deadline ends the waiting."""
        opened: list[OpenedSession] = await _until_reached()(self._gateway.open, [spec])
        return opened[0]

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        chat = ChatClient(self._http, session.base_url)
        return AgentSession(base_url=session.base_url, chat=chat, context_tokens=context_tokens)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        # A gateway that restarts knows its sessions again, also those it had finished when its answer was lost.
        reports: list[SessionReport | SessionUnknown] = await _until_reached()(
            self._gateway.finish, [session.session_id], conversation=conversation
        )
        if isinstance(reports[0], SessionUnknown):
            raise reports[0]
        return reports[0]


class NoSessions(ResourceOwner):
    """For agents that ask no policy."""

    async def __aenter__(self) -> Self:
        return self

    async def open(self, order: RolloutOrder, spec: SessionSpec) -> OpenedSession:
        return OpenedSession(session_id=spec.session_id, base_url="")

    def given(self, session: OpenedSession, *, context_tokens: int) -> AgentSession:
        return AgentSession(base_url="", chat=NoChat(), context_tokens=context_tokens)

    async def finish(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        return report_of(Session(SessionSpec(session_id=session.session_id), opened_at=0.0))


def _until_reached() -> AsyncRetrying:
    """Again while the gateway is away; not when it refuses."""
    return AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, GatewayUnreachable) and not error.answered),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
    )
