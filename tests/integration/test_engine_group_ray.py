"""Engines behind actors of their own: an actor's death is its engine's, and they outlive the group that placed them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.group import EngineGroup
from headrace.actors.engines.host import EngineHost
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.engines.registry import EngineState, Origin
from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.runtime.actors.nodes import this_node
from headrace.actors.runtime.actors.runtime import RayRuntime, node_address
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.policies.push.contract import PushConfig
from headrace.policies.sglang.installation import environment_python
from support import group_rig as kit

pytestmark = pytest.mark.usefixtures("ray_cluster")


@asynccontextmanager
async def placed(
    model: Path, folder: Path, gateway: GatewayActor, runtime: RayRuntime, **engines: Any
) -> AsyncIterator[EngineGroup]:
    """A group in this process whose engines Ray places."""
    given = {"count": 2, "placement": "ray", "cpus": 0.5, "max_context_tokens": 1024, **engines}
    group = EngineGroup(
        EnginesConfig.model_validate(given),
        PushConfig(bucket_bytes=100_000, phase_timeout_s=60.0),
        gateways=[gateway],
        metrics=kit.observing(folder).metrics(),
        model_dir=model,
        seed=1,
        observing=kit.observing(folder),
        runtime=runtime,
    )
    async with group:
        yield group


async def test_an_actor_and_its_engine_die_together_and_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)
    runtime = RayRuntime(f"placed-{os.getpid()}-")
    model = kit.write_weights(tmp_path / "model", 1)
    async with (
        kit.gateway_of(model, tmp_path) as gateway,
        placed(model, tmp_path, gateway, runtime) as group,
    ):
        rig = kit.Rig(group=group, client=None, http=None)
        await rig.push(model, 1)
        first, second = await rig.until_serving(2, "1.1")
        assert {engine.origin for engine in (await rig.engines()).values()} == {Origin.RAY}
        hosts = {name: await runtime.find(EngineHost, name) for name in (first, second)}
        engines = {name: psutil.Process((await host.address()).process_id) for name, host in hosts.items()}

        os.kill((await runtime.stats(hosts[first]))[0], signal.SIGKILL)
        await rig.until(lambda now: first not in now and len(now) == 2)
        engines[first].wait(timeout=kit.GUARD_S)

        engines[second].kill()
        await rig.until(lambda now: second not in now and len(now) == 2)

        async def is_lost() -> bool:
            try:
                await hosts[second].address()
            except (ActorLost, ActorGone):
                return True
            return False

        await kit.until(is_lost)
        left = await rig.until_serving(2, "1.1")
    for name in left:
        with pytest.raises((ActorLost, ActorGone)):
            await (await runtime.find(EngineHost, name)).address()


def lasting(engines: Iterable[EngineStatus]) -> dict[str, EngineStatus]:
    """Without their load, which is unknown until the first look at them."""
    return {engine.engine_id: replace(engine, running=None, waiting=None) for engine in engines}


async def test_a_new_group_takes_over_engines_that_ray_placed(tmp_path: Path) -> None:
    runtime = RayRuntime(f"outlives-{os.getpid()}-")
    model = kit.write_weights(tmp_path / "model", 1)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(kit.gateway_of(model, tmp_path))
        async with placed(model, tmp_path, gateway, runtime) as first:
            await first.push(kit.snapshot(model, 1), rollouts_in_flight=0)
            before = lasting(await first.status())
            # As if it had been killed: it closes nothing.
            first._fleet.members.clear()
        second = await stack.enter_async_context(placed(model, tmp_path, gateway, runtime))
        after = lasting(await second.status())
        assert after == before
        assert {engine.state for engine in after.values()} == {EngineState.SERVING}


async def test_engines_of_a_drained_node_are_replaced_in_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local Ray has one node, so their replacements are there again."""
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)
    runtime = RayRuntime(f"vacated-{os.getpid()}-")
    model = kit.write_weights(tmp_path / "model", 1)
    async with (
        kit.gateway_of(model, tmp_path) as gateway,
        placed(model, tmp_path, gateway, runtime) as group,
    ):
        rig = kit.Rig(group=group, client=None, http=None)
        await rig.push(model, 1)
        before = await rig.until_serving(2, "1.1")
        places = {engine.place for engine in (await rig.engines()).values()}
        assert await group.vacate("another", "192.0.2.1") == []
        assert sorted(await group.vacate(this_node(), node_address())) == sorted(before)
        await rig.until(lambda now: len(now) == 2 and not set(before) & set(now))
        assert {engine.place for engine in (await rig.engines()).values()} == places
        await rig.until_serving(2, "1.1")


@pytest.mark.sglang
@pytest.mark.timeout(900)
async def test_an_engine_of_two_parts_serves_what_is_pushed_and_ends_with_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang itself, half of the model in each of two actors; on a cluster they are on different nodes."""
    python = environment_python()
    if python is None:
        pytest.skip("SGLang is not installed: scripts/install sglang, or scripts/test --sglang")
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)
    monkeypatch.setattr("support.group_rig.GUARD_S", 400.0)
    runtime = RayRuntime(f"parts-{os.getpid()}-")
    model = kit.write_weights(tmp_path / "model", 1)
    parts = {"count": 1, "nodes": 2, "tensor_parallel": 2, "start_timeout_s": 400}
    async with (
        kit.gateway_of(model, tmp_path) as gateway,
        placed(model, tmp_path, gateway, runtime, backend="sglang", dtype="float32", **parts) as group,
    ):
        rig = kit.Rig(group=group, client=None, http=None)
        await rig.push(model, 1)
        [engine] = await rig.until_serving(1, "1.1")
        head, part = [await runtime.find(EngineHost, name) for name in (engine, f"{engine}.1")]
        of_head = psutil.Process((await head.address()).process_id)
        psutil.Process((await part.address()).process_id).kill()
        await rig.until(lambda now: engine not in now)
        of_head.wait(timeout=kit.GUARD_S)
        await rig.until_serving(1, "1.1")
