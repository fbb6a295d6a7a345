"""An engine group that is killed with -9 at every step of a push: the next one leaves no engine behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil
import pytest
import pytest_asyncio

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.group import EngineGroup
from headrace.actors.errors import ActorLost
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.machine import GROUP_PHASES, Phase, PushStep
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.gateway.http.config import GatewayConfig
from support import group_rig as kit

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ray_cluster")]
NAMES = ("a", "b")


class MortalGroup(EngineGroup):
    """Dies at the moments that the file `fatal.json` names, one after another: before a phase of a wave, when the first
    bucket of its wave has come, or when a new group knows what its predecessor left."""

    async def __aenter__(self) -> Self:
        write, self._wave = self._journal.step, 0

        async def step(push_id: str, taken: PushStep) -> None:
            await write(push_id, taken)
            self._wave = taken.wave
            self._die_at(taken.phase.value)

        self._journal.step = step  # type: ignore[method-assign]
        return await super().__aenter__()

    async def _bring_up_to_date(self, *, at_once: bool = False) -> None:
        self._die_at("recovered")
        await super()._bring_up_to_date(at_once=at_once)

    async def _gather_engines(self) -> None:
        call = self._sender.call

        async def calling(op: str, arguments: Any, *, timeout_s: float) -> Any:
            reply = await call(op, arguments, timeout_s=timeout_s)
            if op == "broadcast":
                self._die_at("first bucket")
            return reply

        self._sender.call = calling  # type: ignore[method-assign]
        await super()._gather_engines()

    def _die_at(self, moment: str) -> None:
        fatal = self._directory / "fatal.json"
        if not fatal.exists():
            return
        now, *later = json.loads(fatal.read_text())
        if now == [self._wave, moment]:
            fatal.unlink()
            if later:
                fatal.write_text(json.dumps(later))
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Scene:
    """Two engines, a gateway and a group, the last two as actors. `urls` are engines that somebody else started."""

    kit: Any
    models: list[Path]
    folder: Path
    urls: list[str]
    gateway: GatewayActor
    group: EngineGroup
    client: GatewayClient
    http: aiohttp.ClientSession
    step: int = 0

    async def push(self) -> None:
        """The next weights."""
        self.step += 1
        model = self.models[self.step % len(self.models)]
        await self.group.push(self.kit.snapshot(model, self.step), rollouts_in_flight=0)

    @property
    def fatal(self) -> Path:
        return self.folder / "engines" / "fatal.json"

    def kill_at(self, *moments: tuple[int, str]) -> None:
        """Wave and phase of each death."""
        self.fatal.write_text(json.dumps(moments))

    async def states(self) -> list[tuple[str, str | None]]:
        return [(engine.state, engine.version) for engine in await until_back(self.group.status)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with open_scene(tmp_path_factory.mktemp("run"), *NAMES) as scene:
        yield scene


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disk_scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with open_scene(tmp_path_factory.mktemp("run"), *NAMES, transport="disk") as scene:
        yield scene


@asynccontextmanager
async def open_scene(folder: Path, *attached: str, transport: str = "group") -> AsyncIterator[Scene]:
    """With these engines of somebody else, or with two that the group starts."""
    models = [kit.write_weights(folder / f"model-{seed}", seed) for seed in range(2)]
    runtime = RayRuntime(f"recovery-{os.getpid()}-{len(attached)}-{transport}-")
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(kit.servers(models[0], folder, *attached))
        urls = [process.url for process in servers.values()]
        gateway = await runtime.spawn(
            GatewayActor,
            GatewayConfig(tokenizer_dir=models[0], gate_wait_s=50.0, turn_timeout_s=55.0),
            address_file=folder / "gateway.json",
            observing=kit.observing(folder),
            name="gateway",
        )
        stack.push_async_callback(runtime.stop, gateway)
        group = await runtime.spawn(
            MortalGroup,
            EnginesConfig(count=0 if urls else 2, attach=tuple(urls), max_context_tokens=1024),
            PushConfig.model_validate({"transport": transport, "bucket_bytes": 100_000, "phase_timeout_s": 10.0}),
            gateways=[gateway],
            metrics=kit.observing(folder).metrics(),
            model_dir=models[0],
            seed=1,
            observing=kit.observing(folder),
            name="engines",
        )
        stack.push_async_callback(runtime.stop, group)
        address = await gateway.address()
        client = await stack.enter_async_context(GatewayClient(address.url, address.admin_token))
        timeout = aiohttp.ClientTimeout(total=kit.GUARD_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        scene = Scene(kit, models, folder, urls, gateway, group, client, http)
        await scene.push()
        yield scene


MOMENTS = (*(phase.value for phase in Phase), "first bucket")


DISK_MOMENTS = tuple(phase.value for phase in Phase if phase not in GROUP_PHASES)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_new_group_finishes_the_push_of_a_dead_group(scene: Scene, moment: str) -> None:
    # Both engines are met: the one whose turn it is, and the one whose turn was before or comes after.
    """F4."""
    await finishes_after_death(scene, MOMENTS.index(moment) % 2, moment)


DEFAULT_DISK_MOMENTS = {"broadcast", "verify", "open"}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[] if moment in DEFAULT_DISK_MOMENTS else [pytest.mark.slow])
        for moment in DISK_MOMENTS
    ],
)
async def test_a_new_group_finishes_the_push_by_disk_of_a_dead_group(disk_scene: Scene, moment: str) -> None:
    await finishes_after_death(disk_scene, DISK_MOMENTS.index(moment) % 2, moment)
    kept = {path.name for path in (disk_scene.folder / "engines" / "weights").iterdir()}
    assert kept == {f"1.{disk_scene.step - 1}", f"1.{disk_scene.step}"}


async def finishes_after_death(scene: Scene, wave: int, moment: str) -> None:
    """The group dies before a phase of this wave, and the next one finishes its push."""
    kit = scene.kit
    scene.kill_at((wave, moment))
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(kit.GUARD_S):
        turns = [tasks.create_task(kit.take_turn(scene.client, scene.http, 200)) for _ in range(4)]
        with pytest.raises(ActorLost):
            await scene.push()
        # The call waits until the new group has taken over.
        assert await scene.states() == [("serving", f"1.{scene.step}")] * 2
    assert not any(turn.result().failures for turn in turns)
    assert await kit.is_free(scene.http, scene.urls)
    assert (await scene.gateway.stats()).closed == ()
    assert kit.versions_of(await kit.take_turn(scene.client, scene.http, 8)) == {f"1.{scene.step}"}


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("again", ["recovered", "pause", "first bucket", "verify", "open"])
async def test_a_new_group_finishes_the_push_after_a_failed_recovery(scene: Scene, again: str) -> None:
    # The first death leaves an engine of mixed weights, which the second group pushes to alone, or before that.
    scene.kill_at((0, "first bucket"), (0, again))
    with pytest.raises(ActorLost):
        await scene.push()
    assert await scene.states() == [("serving", f"1.{scene.step}")] * 2
    assert not scene.fatal.exists(), "both deaths came"
    assert await scene.kit.is_free(scene.http, scene.urls)
    assert (await scene.gateway.stats()).closed == ()
    report = await scene.kit.take_turn(scene.client, scene.http, 8)
    assert scene.kit.versions_of(report) == {f"1.{scene.step}"}


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_local_engines_die_with_their_group_and_their_replacements_get_the_newest_weights(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        for moments in ([(0, "gate")], [(1, "first bucket"), (0, "recovered")], [(0, "broadcast"), (1, "open")]):
            before = [psutil.Process(engine.process_id) for engine in await scene.group.status()]
            assert len(before) == 2
            scene.kill_at(*moments)
            with pytest.raises(ActorLost):
                await scene.push()
            assert await scene.states() == [("serving", f"1.{scene.step}")] * 2
            assert not scene.fatal.exists(), "every death came"
            _, left = await asyncio.to_thread(psutil.wait_procs, before, timeout=kit.GUARD_S)
            assert not left
            assert (await scene.gateway.stats()).closed == ()
            report = await kit.take_turn(scene.client, scene.http, 8)
            assert kit.versions_of(report) == {f"1.{scene.step}"}
