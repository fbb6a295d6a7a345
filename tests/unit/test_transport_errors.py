"""What people read of a connection that failed: the address and the reason, no class names."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import aiohttp
import pytest

from headrace.policies.engine import EngineId
from headrace.policies.errors import EngineDown
from headrace.policies.sglang.transport import Transport, reason
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.errors import GatewayUnreachable
from headrace.serve.gateway.http.client import GatewayClient


@pytest.fixture
def closed_url() -> Iterator[str]:
    """Nothing listens there, and nobody else gets the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_a_missing_engine_gives_a_readable_error(closed_url: str) -> None:
    async with aiohttp.ClientSession() as http:
        transport = Transport(EngineId("engine-0"), closed_url, http, timeout_s=5.0)
        with pytest.raises(EngineDown) as error:
            await transport.get("/model_info")
    assert str(error.value) == f"engine-0: nothing is listening at {closed_url}: Connection refused"


async def test_a_missing_gateway_gives_a_readable_error(closed_url: str) -> None:
    async with GatewayClient(closed_url, "token") as client:
        with pytest.raises(GatewayUnreachable) as error:
            await client.open(SessionSpec(session_id=SessionId("s")))
    assert str(error.value) == f"gateway {closed_url}/sessions: Connection refused"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "timed out"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (ConnectionResetError(), "ConnectionResetError"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ],
)
def test_other_transport_failures_have_readable_reasons(error: Exception, words: str) -> None:
    assert reason(error) == words
