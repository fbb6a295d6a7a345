"""Where engines come from and how they go: started, attached, named by a router, added and removed while turns run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.engines import pusher
from headrace.actors.engines.fleet import Fleet, attached_id
from headrace.actors.engines.host import ServerPlan
from headrace.actors.engines.members_file import read_roster
from headrace.actors.engines.registry import REMEMBERED, EngineState, Origin
from headrace.actors.engines.requests import ask_group
from headrace.actors.errors import (
    EngineAddressTaken,
    EngineGroupError,
    EngineNotAdded,
    EngineNotServing,
    EngineUnknown,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, PauseMode
from headrace.policies.errors import EngineStartFailed
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push.machine import Phase
from headrace.sandboxes.host.key_files import make_key, read_key
from headrace.serve.tracing import span_names as names
from support import group_rig as kit
from support.recorded_spans import attributes_of, parent_id, recorded_spans
from support.sglang_sources import write_sglang_sources

HANGING_SERVER = """#!/bin/sh
if [ "$2" = -c ]; then echo 0.5.23; dirname "$0"; exit; fi
if mkdir "$0.died"; then exit 1; fi
touch "$0.hangs"
exec sleep 1000
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [kit.write_weights(folder / str(seed), seed) for seed in range(3)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)


async def test_attached_engines_receive_pushes_and_keep_running_at_shutdown(models: list[Path], tmp_path: Path) -> None:
    async with kit.servers(models[0], tmp_path, "a", "b") as servers:
        urls = [process.url for process in servers.values()]
        async with kit.open_group(models[0], tmp_path, count=0, attach=urls) as rig:
            assert {engine.state for engine in (await rig.engines()).values()} == {EngineState.WAITING}
            await rig.push(models[1], 1)
            engines = await rig.until_serving(2, "1.1")
            assert {engine.origin for engine in engines.values()} == {Origin.ATTACHED}
            assert kit.versions_of(await rig.turn()) == {"1.1"}
        assert all(process.alive for process in servers.values())
        async with kit.open_group(models[0], tmp_path, count=0, attach=urls) as rig:
            # What was pushed is known to whoever comes next: no catch-up, no wait.
            assert {engine.state for engine in (await rig.engines()).values()} == {EngineState.SERVING}
            assert kit.versions_of(await rig.turn()) == {"1.1"}


async def test_a_push_is_a_span_with_its_phases_and_what_became_of_each_engine(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded_spans(monkeypatch, pusher) as recorded:
        async with kit.servers(models[0], tmp_path, "a", "b") as servers:
            options = {"count": 0, "attach": tuple(process.url for process in servers.values())}
            async with kit.open_group(models[0], tmp_path, push={"phase_timeout_s": 2.0}, **options) as rig:
                await rig.push(models[1], 1)
                os.kill(servers["b"].pid, signal.SIGSTOP)
                await rig.push(models[2], 2)
                os.kill(servers["b"].pid, signal.SIGCONT)
    good, bad = (
        next(span for span in recorded.named(names.PUSH) if attributes_of(span)[names.PUSH_VERSION] == version)
        for version in ("1.1", "1.2")
    )
    said = attributes_of(good)
    assert said[names.PUSH_OUTCOMES] == ("updated", "updated")
    assert (said[names.PUSH_TRANSPORT], parent_id(good), good.status.is_ok) == ("group", 0, True)
    assert isinstance(said[names.PUSH_BYTES], int) and said[names.PUSH_BYTES] > 0
    assert good.context is not None and bad.context is not None
    below = [span for span in recorded.named(names.PUSH_PHASE) if parent_id(span) == good.context.span_id]
    phases = [(attributes_of(span)[names.WAVE], attributes_of(span)[names.PHASE]) for span in below]
    assert phases == [(wave, phase.value) for wave in (0, 1) for phase in Phase if phase is not Phase.PULL]
    assert all(
        span.end_time is not None and good.start_time <= span.start_time <= span.end_time <= good.end_time  # type: ignore[operator]
        for span in below
    )
    assert attributes_of(bad)[names.PUSH_OUTCOMES] == ("updated", "quarantined")
    assert (attributes_of(bad)[names.ERROR_TYPE], bad.status.is_ok) == ("quarantined", False)
    assert good.context.trace_id != bad.context.trace_id


async def test_weights_that_somebody_else_pushed_are_believed_where_an_engine_reports_them(
    models: list[Path], tmp_path: Path
) -> None:
    async with (
        kit.servers(models[0], tmp_path, "a", "b") as servers,
        kit.open_group(models[0], tmp_path, count=0, attach=[process.url for process in servers.values()]) as rig,
    ):
        await rig.push(models[1], 1)
        await rig.until_serving(2, "1.1")
        newer = PolicyVersion(1, 2)
        assert await rig.group.holding(newer) == []
        first, second = (attached_id(process.url) for process in servers.values())
        await relabel(rig, servers["a"].url, newer)
        assert await rig.group.holding(newer) == [first]
        await rig.group.push(WeightsSnapshot(version=newer), rollouts_in_flight=0)
        assert await rig.group.served_version() == newer
        # Longer than a look of the supervision: nothing is pushed to the other engine, which goes on serving.
        await asyncio.sleep(0.5)
        assert {name: engine.version for name, engine in (await rig.engines()).items()} == {first: "1.2", second: "1.1"}
        await relabel(rig, servers["b"].url, newer)
        await rig.until_serving(2, "1.2")
        assert kit.versions_of(await rig.turn()) == {"1.2"}


async def relabel(rig: kit.Rig, url: str, version: PolicyVersion) -> None:
    """Change the version of an engine's weights, as a trainer does that pushes by itself."""
    body = {"new_version": str(version), "abort_all_requests": False}
    async with rig.http.post(f"{url}/update_weight_version", json=body) as response:
        assert response.status == 200, await response.text()


async def test_own_and_attached_engines_have_different_keys(models: list[Path], tmp_path: Path) -> None:
    make_key(theirs := tmp_path / "their-key")
    ours = tmp_path / "engines" / "key"
    async with kit.servers(models[0], tmp_path, "a", key_file=theirs) as servers:
        options = {"count": 1, "attach": [servers["a"].url], "key_file": theirs}
        async with kit.open_group(models[0], tmp_path, push={"transport": "disk"}, **options) as rig:
            await rig.push(models[1], 1)
            engines = await rig.until_serving(2, "1.1")
            # Turns of one session go to one engine; six sessions use both.
            async with asyncio.TaskGroup() as tasks:
                turns = [tasks.create_task(rig.turn()) for _ in range(6)]
            assert {version for turn in turns for version in kit.versions_of(turn.result())} == {"1.1"}
            key, their_key = read_key(ours, "key"), read_key(theirs, "key")
            for engine in engines.values():
                fits, other = (key, their_key) if engine.origin is Origin.LOCAL else (their_key, key)
                for given, expected in ((fits, 200), (other, 401), (None, 401)):
                    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
                    async with rig.http.get(f"{engine.url}/server_info", headers=headers) as response:
                        assert response.status == expected, (engine, expected)
        async with kit.open_group(models[0], tmp_path, **options) as rig:
            assert read_key(ours, "key") == key, "a restarted group uses the run's key"
            await rig.until_serving(2, "1.1")


async def test_an_attached_server_with_another_key_is_not_added_and_the_setting_is_named(
    models: list[Path], tmp_path: Path
) -> None:
    make_key(theirs := tmp_path / "their-key")
    async with (
        kit.servers(models[0], tmp_path, "a", key_file=theirs) as servers,
        kit.open_group(models[0], tmp_path, count=1) as rig,
    ):
        with pytest.raises(EngineNotAdded, match=r"needs another key: set engines\.key_file"):
            await rig.group.add(servers["a"].url)


async def test_in_place_pushes_do_not_mark_fresh_tokens_as_stale(models: list[Path], tmp_path: Path) -> None:
    """Requests carry the version of their engine: after its first push, after a flush, added later and taken over."""
    requests = tmp_path / "engines" / "requests"
    options = {"push": {"pause_mode": "in_place"}, "gateway": {"in_place_pushes": True}, "count": 0}
    async with kit.servers(models[0], tmp_path, "a", "b") as servers:
        first, second = (process.url for process in servers.values())
        async with kit.open_group(models[0], tmp_path, attach=[first], **options) as rig:
            await rig.push(models[1], 1)
            assert kit.flags_of(await rig.turn()) == [("1.1", False)]
            # Answered by the supervision: it looked at the engine after the push.
            await asyncio.to_thread(ask_group, requests, "add", second, timeout_s=kit.GUARD_S)
            async with asyncio.TaskGroup() as tasks:
                turns = [tasks.create_task(rig.turn(64)) for _ in range(8)]
            assert [kit.flags_of(turn.result()) for turn in turns] == [[("1.1", False)]] * 8
        async with kit.open_group(models[0], tmp_path, attach=[first], **options) as rig:
            assert kit.flags_of(await rig.turn()) == [("1.1", False)]


async def test_an_attached_engine_rejoins_with_the_newest_weights_after_a_hang(
    models: list[Path], tmp_path: Path
) -> None:
    async with kit.servers(models[0], tmp_path, "a") as servers:
        [hanging] = servers.values()
        options = {"count": 1, "attach": [hanging.url], "health_timeout_s": 1.0}
        async with kit.open_group(models[0], tmp_path, push={"phase_timeout_s": 2.0}, **options) as rig:
            await rig.push(models[1], 1)
            engines = await rig.until_serving(2, "1.1")
            [name] = [name for name, engine in engines.items() if engine.origin is Origin.ATTACHED]
            os.kill(hanging.pid, signal.SIGSTOP)
            await rig.until(lambda engines: engines[name].state is EngineState.QUARANTINED)
            await rig.push(models[2], 2)
            assert kit.versions_of(await rig.turn()) == {"1.2"}
            os.kill(hanging.pid, signal.SIGCONT)
            await rig.until_serving(2, "1.2")
            assert hanging.alive
            sums = [await rig.group._fleet[engine].client.checksums() for engine in await rig.engines()]
            assert sums[0] == sums[1]


@pytest.mark.slow
async def test_a_first_prompt_of_37000_tokens_does_not_get_the_engine_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as Codex's is to a tokenizer of bytes. While it is computed the engine passes its health checks."""
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.5)
    model = kit.write_weights(tmp_path / "model", seed=3)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    engines = {"count": 1, "max_running": 2, "max_context_tokens": 65536, "health_misses": 1}
    gateway = {"turn_timeout_s": 600.0}
    async with kit.open_group(model, tmp_path, gateway=gateway, **engines) as rig:
        await rig.push(model, 0)
        [(name, engine)] = (await rig.until_serving(1, "1.0")).items()
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(kit.take_turn(rig.client, rig.http, 8, text="x" * 37_000, context_tokens=65536))
            await rig.until(lambda now: now[name].running == 1)
        assert turn.result().sampled_tokens == 8
        [after] = (await rig.until_serving(1, "1.0")).values()
        assert (after.engine_id, after.process_id) == (name, engine.process_id)


async def test_engines_are_added_and_removed_while_turns_are_running(models: list[Path], tmp_path: Path) -> None:
    async with (
        kit.servers(models[0], tmp_path, "a", "b") as servers,
        kit.open_group(models[0], tmp_path, count=0, attach=[servers["a"].url], drain_timeout_s=0.5) as rig,
    ):
        await rig.push(models[1], 1)
        [first] = await rig.until_serving(1, "1.1")
        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(rig.turn(900)) for _ in range(4)]
            await kit.until_running(rig.group._fleet[first].client, 4)
            second = await rig.group.add(servers["b"].url)
            assert await rig.group.add(servers["b"].url + "/") == second
            # Its turns do not end within the drain: they go on at the other one.
            await rig.group.remove(first)
            await rig.group.remove(first)
        assert set(await rig.until_serving(1, "1.1")) == {second}
        assert all(kit.versions_of(turn.result()) == {"1.1"} for turn in turns)
        assert not any(turn.result().failures for turn in turns)
        assert servers["a"].alive
        assert await kit.is_free(rig.http, [servers["a"].url])
        with pytest.raises(EngineUnknown):
            await rig.group.remove("nobody")
        with pytest.raises(EngineNotAdded, match="does not answer"):
            await rig.group.add("http://127.0.0.1:9")
        with pytest.raises(EngineNotAdded, match="http://host:port"):
            await rig.group.add("127.0.0.1")


async def test_a_push_does_not_wait_for_a_draining_engine(models: list[Path], tmp_path: Path) -> None:
    async with (
        kit.servers(models[0], tmp_path, "a", "b") as servers,
        kit.open_group(models[0], tmp_path, count=0, attach=[servers["a"].url], drain_timeout_s=100.0) as rig,
    ):
        await rig.push(models[1], 1)
        [first] = await rig.until_serving(1, "1.1")
        async with asyncio.TaskGroup() as tasks:
            client = rig.group._fleet[first].client
            turn = tasks.create_task(rig.turn(900))
            await kit.until_running(client, 1)
            await client.pause(PauseMode.RETRACT)
            second = await rig.group.add(servers["b"].url)
            removing = tasks.create_task(rig.group.remove(first))
            await rig.until(lambda engines: engines[first].state is EngineState.LEAVING)
            await rig.push(models[2], 2)
            assert not removing.done()
            with pytest.raises(EngineNotAdded, match="still leaving"):
                await rig.group.add(servers["a"].url)
            await client.resume()
        assert kit.versions_of(turn.result()) == {"1.1"}
        assert set(await rig.until_serving(1, "1.2")) == {second}


async def test_a_push_does_not_wait_for_a_starting_engine(models: list[Path], tmp_path: Path) -> None:
    # A server that dies at its first start, and hangs at the next ones.
    python = tmp_path / "python"
    python.write_text(HANGING_SERVER)
    write_sglang_sources(tmp_path)
    python.chmod(0o700)
    options = {"backend": "sglang", "sglang": {"python": python}, "count": 1, "start_timeout_s": 100.0}
    async with (
        kit.servers(models[0], tmp_path, "a") as servers,
        kit.open_group(models[0], tmp_path, attach=[servers["a"].url], **options) as rig,
    ):
        await rig.until(lambda engines: "engine-2" in engines)

        async def hangs() -> bool:
            return python.with_suffix(".hangs").exists()

        await kit.until(hangs)
        await rig.push(models[1], 1)
        assert (await rig.engines())["engine-2"].state is EngineState.STARTING
        assert kit.versions_of(await rig.turn()) == {"1.1"}
        await rig.group.remove("engine-2")
        await rig.until_serving(1, "1.1")


async def test_an_in_place_push_works_through_the_group_and_the_gateway(models: list[Path], tmp_path: Path) -> None:
    options = {"count": 1, "push": {"pause_mode": "in_place"}, "gateway": {"in_place_pushes": True}}
    async with kit.open_group(models[0], tmp_path, **options) as rig:
        await rig.push(models[1], 1)
        [name] = await rig.until_serving(1, "1.1")
        routed: list[str | None] = []
        pool = rig.group._gate._gateways[0]._gateway._pool

        turns: list[asyncio.Task[Any]] = []

        async def look() -> None:
            routed.append(pool.router.namespace(name))

        async with asyncio.TaskGroup() as tasks:

            async def begin_a_turn() -> None:
                turns.append(tasks.create_task(rig.turn(900)))
                await kit.until_running(rig.group._fleet[name].client, 1)

            rig.before(0, Phase.GATE, begin_a_turn)
            rig.before(0, Phase.DISBAND, look)
            await rig.push(models[2], 2)
            meanwhile = await rig.turn()
        assert routed == ["1.2"], "nothing new shares what the older weights cached"
        assert kit.flags_of(turns[0].result()) == [("1.1", False), ("1.2", True)]
        assert kit.flags_of(meanwhile) == [("1.2", False)]
        assert kit.flags_of(await rig.turn()) == [("1.2", False)]


async def test_removing_an_engine_that_a_push_left_paused_resumes_it(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 1000.0)
    async with kit.servers(models[0], tmp_path, "a") as servers:
        url = servers["a"].url
        async with kit.open_group(models[0], tmp_path, count=0, attach=[url]) as rig:
            await rig.push(models[1], 1)
            [name] = await rig.until_serving(1, "1.1")
            client = rig.group._fleet[name].client
            await client.pause(PauseMode.RETRACT)
            await client.begin_update()
            rig.group._registry.suspect(name, "a push was broken off")
            await rig.group.remove(name)
            assert await kit.is_free(rig.http, [url])


async def test_adding_an_engine_that_cannot_load_the_weights_fails(
    models: list[Path], tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    odd = write_model(tmp_path / "odd")
    async with (
        kit.servers(odd, tmp_path, "odd") as servers,
        kit.open_group(models[0], tmp_path, count=1) as rig,
    ):
        await rig.push(models[1], 1)
        with pytest.raises(EngineNotServing, match="serves another model"):
            await rig.group.add(servers["odd"].url)
        assert (await rig.engines())[attached_id(servers["odd"].url)].state is EngineState.QUARANTINED


async def test_removed_engines_stay_removed_in_the_next_group(models: list[Path], tmp_path: Path) -> None:
    async with kit.servers(models[0], tmp_path, "a", "b") as servers:
        urls = [process.url for process in servers.values()]
        async with kit.open_group(models[0], tmp_path, count=0, attach=urls[:1]) as rig:
            added = await rig.group.add(urls[1])
            await rig.group.remove(next(name for name in await rig.engines() if name != added))
        async with kit.open_group(models[0], tmp_path, count=0, attach=urls[:1]) as rig:
            assert set(await rig.engines()) == {added}


async def test_a_new_group_receives_requests_after_the_clock_is_set_back(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        kit.servers(models[0], tmp_path, "a", "b") as servers,
        kit.gateway_of(models[0], tmp_path) as gateway,
    ):
        for name in ("a", "b"):
            attach = [servers[name].url]
            async with kit.make_group(models[0], tmp_path, gateway, {}, count=0, attach=attach) as group:
                await group.push(kit.snapshot(models[1], 1), rollouts_in_flight=0)
                table = (await gateway.stats()).table_version
            # The next group of the run starts in 1970.
            monkeypatch.setattr("time.time_ns", lambda: 0)
            monkeypatch.setattr("time.time", lambda: 0.0)
            (tmp_path / "engines" / "members.json").unlink()
        assert table >> 32 == 2
        [route] = gateway._gateway._pool.router.table.engines
        assert route.url == servers["b"].url


async def test_operators_add_and_remove_engines_through_the_run_directory(models: list[Path], tmp_path: Path) -> None:
    requests = tmp_path / "engines" / "requests"
    async with (
        kit.servers(models[0], tmp_path, "a", "b") as servers,
        kit.open_group(models[0], tmp_path, count=0, attach=[servers["a"].url]) as rig,
    ):
        added = await asyncio.to_thread(ask_group, requests, "add", servers["b"].url, timeout_s=kit.GUARD_S)
        assert set(await rig.engines()) > {added}
        assert await asyncio.to_thread(ask_group, requests, "remove", added, timeout_s=kit.GUARD_S) == added
        assert added not in await rig.engines()
        with pytest.raises(EngineGroupError, match="there is no engine nobody"):
            await asyncio.to_thread(ask_group, requests, "remove", "nobody", timeout_s=kit.GUARD_S)
        assert not list(requests.iterdir())
        told = {engine.engine_id: engine for engine in read_roster(tmp_path / "engines" / "members.json").engines}
        assert told[added].state is EngineState.GONE


async def test_the_members_file_is_written_only_when_the_roster_has_changed(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writing makes a new file and waits for the disk. Loads alone are written now and then."""
    monkeypatch.setattr(pusher, "LOADS_S", 1e9)
    members = tmp_path / "engines" / "members.json"
    async with (
        kit.servers(models[0], tmp_path, "a", "b") as servers,
        kit.open_group(models[0], tmp_path, count=0, attach=[servers["a"].url]) as rig,
    ):
        publisher = rig.group._publisher
        assert publisher is not None
        await publisher.publish()
        written = members.stat().st_ino, members.stat().st_mtime_ns
        for _ in range(5):
            await publisher.publish()
        assert (members.stat().st_ino, members.stat().st_mtime_ns) == written
        await rig.group.add(servers["b"].url)
        await publisher.publish()
        assert (members.stat().st_ino, members.stat().st_mtime_ns) != written
        assert len(read_roster(members).engines) == 2


async def test_two_engines_at_one_address_are_refused(models: list[Path], tmp_path: Path) -> None:
    async with kit.open_group(models[0], tmp_path, count=1) as rig:
        [(name, engine)] = (await rig.engines()).items()
        with pytest.raises(EngineAddressTaken, match=f"and {name} have the same address"):
            await rig.group.add(engine.url)


async def test_an_engine_whose_address_is_taken_is_replaced(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = Fleet._start_local, []

    async def start_at_a_taken_address(fleet: Fleet, plan: ServerPlan) -> Any:
        member = await start(fleet, plan)
        started.append(member)
        if len(started) == 1:
            # As an attached server does that died, and whose port the kernel gave to this process.
            url, other = member.client.url, EngineId("other")
            fleet._registry.starting(other, place="other", origin=Origin.ATTACHED, now=0.0, url=url)
        return member

    monkeypatch.setattr(Fleet, "_start_local", start_at_a_taken_address)
    async with kit.open_group(models[0], tmp_path, count=2) as rig:
        await rig.until(lambda engines: len(engines) == 3 and "engine-3" in engines)
        refused = started[0].engine_id
        [status] = [status for status in await rig.group.status() if status.engine_id == refused]
        assert status.state is EngineState.GONE
        assert "have the same address" in status.reason
        assert not await started[0].handle.is_alive()


async def test_a_group_starts_even_if_the_newest_snapshot_is_corrupt(models: list[Path], tmp_path: Path) -> None:
    spoilt = kit.write_weights(tmp_path / "spoilt", 7)
    async with kit.open_group(models[0], tmp_path, count=1) as rig:
        await rig.push(spoilt, 1)
    (spoilt / "model.safetensors").write_bytes(b"{")
    async with kit.open_group(models[0], tmp_path, count=1) as rig:
        assert {engine.state for engine in (await rig.engines()).values()} == {EngineState.WAITING}
        await rig.push(models[1], 2)
        await rig.until_serving(1, "1.2")


async def test_a_health_check_ignores_an_engine_removed_during_the_check(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 1000.0)
    async with kit.servers(models[0], tmp_path, "a", "b") as servers:
        urls = [process.url for process in servers.values()]
        async with kit.open_group(models[0], tmp_path, count=0, attach=urls, health_timeout_s=60.0) as rig:
            name, registry = attached_id(urls[0]), rig.group._registry
            os.kill(servers["a"].pid, signal.SIGSTOP)
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(rig.group._health.check())
                await asyncio.sleep(0)
                await rig.group._fleet.end(name, "it left")
                for number in range(REMEMBERED + 1):
                    other = EngineId(f"other-{number}")
                    registry.starting(other, place="other", origin=Origin.LOCAL, now=0.0)
                    registry.gone(other, "it left too")
                assert not registry.stands(name, *EngineState)
                os.kill(servers["a"].pid, signal.SIGCONT)
            assert looking.result() == {}


async def test_a_group_without_any_engine_does_not_start(models: list[Path], tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="nothing is listening"):
        async with kit.open_group(models[0], tmp_path, count=0, attach=["http://127.0.0.1:9"]):
            raise AssertionError
