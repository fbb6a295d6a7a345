"""Gateway actor, whose address survives a restart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.actors.engine_group.gate import call_gateway
from headrace.actors.places.gateway import GatewayActor
from headrace.actors.record.actor_telemetry import ActorTelemetry
from headrace.serve.gateway.config import GatewayConfig
from headrace.serve.observing.telemetry import TelemetryConfig

if TYPE_CHECKING:
    import pytest

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


async def test_the_engines_keep_running_when_the_gateway_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    async def entering_fails() -> None:
        raise OSError("the address is in use")

    await call_gateway(entering_fails())
    assert "the call to the gateway failed" in caplog.text
