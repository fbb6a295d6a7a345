"""Gateway actor, whose address survives a restart."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from headrace.actors.engines.gate import call_gateway
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.prompts import LONG_TEXT_CHARACTERS
from headrace.serve.tracing.telemetry import TelemetryConfig

TOKENIZER = Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny"
FIRST, LAST = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
"""What the kernel gives to outgoing connections."""


def gateway_of(folder: Path) -> GatewayActor:
    return GatewayActor(
        GatewayConfig(tokenizer_dir=TOKENIZER),
        address_file=folder / "gateway.json",
        observing=ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=folder),
    )


async def test_a_restarted_gateway_has_the_same_address(tmp_path: Path) -> None:
    async with gateway_of(tmp_path) as first:
        address = await first.address()
    async with gateway_of(tmp_path) as second:
        assert await second.address() == address


async def test_the_gateways_port_is_never_assigned_to_an_outgoing_connection(tmp_path: Path) -> None:
    async with gateway_of(tmp_path) as gateway:
        address = await gateway.address()
    port = urlsplit(address.url).port
    assert port is not None
    assert not FIRST <= port <= LAST


@pytest.mark.usefixtures("ray_cluster")
async def test_a_gateway_in_an_actor_renders_apart(tmp_path: Path) -> None:
    """Long texts are rendered by processes that the actor starts."""
    runtime = RayRuntime(f"renders-{os.getpid()}-")
    async with AsyncExitStack() as stack:
        actor = await runtime.spawn(
            GatewayActor,
            GatewayConfig(tokenizer_dir=TOKENIZER),
            name="gateway",
            address_file=tmp_path / "gateway.json",
            observing=ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=tmp_path),
        )
        stack.push_async_callback(runtime.stop, actor)
        address = await actor.address()
        client = await stack.enter_async_context(GatewayClient(address.url, address.admin_token))
        session = await client.open(SessionSpec(session_id=SessionId("s")))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"messages": [{"role": "user", "content": "long " * LONG_TEXT_CHARACTERS}]}
        async with http.post(f"{session.base_url}/v1/tokenize", json=body) as response:
            found = await response.json()
        assert (response.status, found["count"] > LONG_TEXT_CHARACTERS) == (200, True)


async def test_the_engines_keep_running_when_the_gateway_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    async def entering_fails() -> None:
        raise OSError("the address is in use")

    await call_gateway(entering_fails())
    assert "the call to the gateway failed" in caplog.text
