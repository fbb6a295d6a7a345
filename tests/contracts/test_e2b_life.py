"""Life of the E2B server's sandboxes: timeouts, restarts, disconnected clients, slow readers, many sandboxes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.base import SandboxRef
from headrace.sandboxes.errors import BootFailed, SandboxError
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.local.sandbox import LocalSandbox
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.table import SandboxTables, State

pytestmark = pytest.mark.namespaces
START = "process.Process/Start"


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    async with LocalProvider() as local:
        yield local


@pytest.fixture
async def server(local: LocalProvider) -> AsyncIterator[E2bServer]:
    async with E2bServer(local) as server:
        yield server


def bash(command: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": False, **more}


async def until(check: Callable[[], Awaitable[object]]) -> None:
    """Poll until a condition holds, because the server sends no event for it. The test's timeout limits the wait."""
    while not await check():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def none_left(local: LocalProvider) -> bool:
    return not await local.list()


async def test_a_sandbox_ends_at_its_timeout(server: E2bServer, local: LocalProvider, wire: Callable[..., Any]) -> None:
    kept = await wire(server.url).create(timeout=60)
    await kept.call("POST", f"/sandboxes/{kept.id}/timeout", {"timeout": 100})
    box = await wire(server.url).create(timeout=60)
    async with box.stream(START, bash("sleep 68")) as frames:
        assert "start" in (await anext(frames))["event"]
        await box.call("POST", f"/sandboxes/{box.id}/timeout", {"timeout": 1})
        assert [item async for item in frames][-1]["end"]["error"]["code"] == "unavailable"
    assert (await box.call("GET", f"/sandboxes/{box.id}"))[0] == 404
    status, answer, _ = await box.rpc("process.Process/List", {})
    assert (status, "was not found" in answer["message"]) == (502, True)
    assert (await kept.run("echo on"))[0] == b"on\n"
    await kept.call("POST", f"/sandboxes/{kept.id}/timeout", {"timeout": 0})
    await until(lambda: none_left(local))


async def test_a_sandbox_with_auto_pause_pauses_at_its_timeout(server: E2bServer, wire: Callable[..., Any]) -> None:
    box = await wire(server.url).create(timeout=1, autoPause=True)

    async def paused() -> bool:
        return (await box.call("GET", f"/sandboxes/{box.id}"))[1]["state"] == "paused"

    await until(paused)
    assert (await box.rpc("process.Process/List", {}))[0] == 502
    assert (await box.call("POST", f"/sandboxes/{box.id}/pause", {}))[0] == 409
    assert (await box.call("POST", f"/sandboxes/{box.id}/resume", {"timeout": 60}))[0] == 201
    assert (await box.run("echo on"))[0] == b"on\n"
    assert (await box.call("POST", f"/v2/sandboxes/{box.id}/connect", {}))[0] == 200


class NoFreezer(LocalProvider):
    """A provider whose sandboxes cannot be paused."""

    async def attach(self, ref: SandboxRef) -> LocalSandbox:
        return Unfreezable(ref, self._connections)


class Unfreezable(LocalSandbox):
    async def pause(self) -> None:
        raise BootFailed("no freezer")


async def test_a_failed_pause_does_not_extend_the_lease(wire: Callable[..., Any]) -> None:
    async with NoFreezer() as provider, E2bServer(provider, ServerSettings()) as server:
        box = await wire(server.url).create(timeout=300)
        assert (await box.call("POST", f"/sandboxes/{box.id}/pause", {}))[0] == 503
        [info] = await provider.list()
        assert info.expires_in_s < 400


async def test_a_sandbox_that_died_on_its_own_is_reported_as_gone(
    server: E2bServer, local: LocalProvider, wire: Callable[..., Any]
) -> None:
    box = await wire(server.url).create()
    async with box.http.get(f"{box.url}/health", headers={"E2b-Sandbox-Id": box.id}) as reply:
        assert reply.status == 204
    assert local.launcher_pid is not None
    other = await wire(server.url).create()
    os.kill(local.launcher_pid, signal.SIGKILL)
    while (await box.run("true"))[1] == {"exitCode": 0, "exited": True, "status": "exit status 0"}:
        continue
    async with box.http.get(f"{box.url}/health", headers={"E2b-Sandbox-Id": box.id}) as reply:
        assert (reply.status, "was not found" in await reply.text()) == (502, True)

    async def none_listed() -> bool:
        status, rows, _ = await other.call("GET", "/v2/sandboxes")
        assert status == 200
        return not rows

    await until(none_listed)
    assert (await other.call("GET", f"/sandboxes/{other.id}"))[0] == 404


async def test_sandboxes_and_their_timeouts_survive_a_restart(
    local: LocalProvider, tmp_path: Path, wire: Callable[..., Any]
) -> None:
    settings = ServerSettings(state_folder=tmp_path / "state", keep_sandboxes=True, domain="localhost:8900")
    async with E2bServer(local, settings) as server:
        client = wire(server.url)
        box = await client.create(timeout=100, metadata={"a": "1"}, envVars={"A": "kept"})
        short = await client.create(timeout=1)
        killed = await client.create(timeout=100)
        key = {"Idempotency-Key": "once"}
        made = await client.call("POST", "/v2/sandboxes", {"templateID": "base"}, **key)
        before = (await client.call("GET", f"/sandboxes/{box.id}"))[1]
        with pytest.raises(SandboxError, match="in use by another process"):
            async with E2bServer(local, settings):
                pass
    [dead] = [info.id for info in await local.list() if info.labels["e2b_sandbox"] == killed.id]
    await end(local, tmp_path / "state", killed.id)
    assert dead not in {info.id for info in await local.list()}
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()}
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    async with E2bServer(local, settings) as server:
        box.url = client.url = server.url
        assert (await client.call("GET", f"/sandboxes/{box.id}"))[1] == before
        assert (await box.run("echo $A"))[0] == b"kept\n"
        assert (await client.call("GET", f"/sandboxes/{killed.id}"))[0] == 404
        again = await client.call("POST", "/v2/sandboxes", {"templateID": "base"}, **key)
        assert again[1] == made[1]

        async def ended() -> bool:
            # To clients it is dead as soon as the server begins to kill it.
            told = await client.call("GET", f"/sandboxes/{short.id}")
            return told[0] == 404 and short.id not in {info.labels["e2b_sandbox"] for info in await local.list()}

        await until(ended)
    async with E2bServer(local, replace(settings, keep_sandboxes=False)):
        assert len(await local.list()) == 2
    assert await local.list() == []


async def end(local: LocalProvider, state: Path, sandbox_id: str) -> None:
    """Kill a sandbox at the provider, without the server."""
    tables = SandboxTables(state)
    [row] = [row for row in tables.sandboxes.all() if row.id == sandbox_id]
    tables.close()
    assert row.ref is not None
    await (await local.attach(row.ref)).kill()


async def test_boots_interrupted_by_a_crash_are_recovered(
    local: LocalProvider, tmp_path: Path, wire: Callable[..., Any]
) -> None:
    settings = ServerSettings(state_folder=tmp_path, keep_sandboxes=True)
    body = {"templateID": "base"}
    async with E2bServer(local, settings) as server:
        kept = (await wire(server.url).call("POST", "/v2/sandboxes", body, **{"Idempotency-Key": "k"}))[1]["sandboxID"]
        await wire(server.url).create()
    # As a crash between the provider's answer and ours leaves them, and one whose boot never began.
    tables = SandboxTables(tmp_path)
    for row in tables.sandboxes.all():
        tables.sandboxes.put(replace(row, state=State.BOOTING, ref=None))
    tables.sandboxes.put(replace(row, id="never", boot_key="never", client_key="", state=State.BOOTING, ref=None))
    tables.close()
    async with E2bServer(local, settings) as server:
        rows = (await wire(server.url).call("GET", "/v2/sandboxes"))[1]
        assert [row["sandboxID"] for row in rows] == [kept]
        again = await wire(server.url).call("POST", "/v2/sandboxes", body, **{"Idempotency-Key": "k"})
        assert again[1]["sandboxID"] == kept
    assert len(await local.list()) == 1


def test_a_table_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    SandboxTables(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "sandboxes.db")) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(SandboxError, match=r"sandboxes\.db is of an unreleased version") as refused:
        SandboxTables(tmp_path)
    assert "\n" not in str(refused.value)


async def test_a_create_by_a_disconnected_client_leaves_nothing_behind(
    server: E2bServer, local: LocalProvider, wire: Callable[..., Any]
) -> None:
    client = wire(server.url)
    keyed = {"Idempotency-Key": "stay"}
    for number in range(8):
        task = asyncio.create_task(client.call("POST", "/v2/sandboxes", {"templateID": "base"}))
        await asyncio.sleep(0.003 * number)
        task.cancel()
        await asyncio.wait((task,))
    task = asyncio.create_task(client.call("POST", "/v2/sandboxes", {"templateID": "base"}, **keyed))
    await asyncio.sleep(0.01)
    task.cancel()
    stays = (await client.call("POST", "/v2/sandboxes", {"templateID": "base"}, **keyed))[1]["sandboxID"]

    async def as_many_as_are_listed() -> bool:
        rows = (await client.call("GET", "/v2/sandboxes"))[1]
        assert stays in [row["sandboxID"] for row in rows]
        return len(await local.list()) == len(rows)

    await until(as_many_as_are_listed)


async def test_a_command_survives_a_kill_of_its_client(server: E2bServer, wire: Callable[..., Any]) -> None:
    box = await wire(server.url).create()
    await box.run("mkfifo /tmp/go")
    program = """
        import sys, e2b
        sandbox = e2b.Sandbox.connect(sys.argv[2], api_url=sys.argv[1], sandbox_url=sys.argv[1], api_key="e2b_0")
        sandbox.commands.run("echo ready; read x < /tmp/go; echo after; exit 6", timeout=0, on_stdout=lambda text:
            print(text, flush=True))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), server.url, box.id]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    child.kill()
    await child.wait()
    [process] = (await box.rpc("process.Process/List", {}))[1]["processes"]
    async with box.stream("process.Process/Connect", {"process": {"pid": process["pid"]}}) as frames:
        assert (await anext(frames))["event"]["start"]["pid"] == process["pid"]
        await box.run("echo > /tmp/go")
        rest = [item async for item in frames]
    assert base64.b64decode(rest[0]["event"]["data"]["stdout"]) == b"after\n"
    assert rest[1]["event"]["end"]["exitCode"] == 6


async def test_a_slow_reader_slows_only_its_own_command(server: E2bServer, wire: Callable[..., Any]) -> None:
    box = await wire(server.url).create()
    size = 24 << 20
    command = f"head -c {size} /dev/zero | tr '\\0' x; touch /tmp/all-written; echo end"
    async with box.stream(START, bash(command)) as frames:
        assert "start" in (await anext(frames))["event"]
        for _ in range(5):
            out, _ = await box.run("echo other; ls /tmp")
            # It cannot have written all: nobody has read it, and nothing on the way holds so much.
            assert out == b"other\n"
        total = 0
        async for message in frames:
            total += len(base64.b64decode(message.get("event", {}).get("data", {}).get("stdout", "")))
    assert total == size + 4


async def test_a_command_without_readers_keeps_running(server: E2bServer, wire: Callable[..., Any]) -> None:
    box = await wire(server.url).create()
    command = "head -c 3000000 /dev/zero | tr '\\0' x; touch /tmp/done; echo end; exit 3"
    async with box.stream(START, bash(command)) as frames:
        pid = (await anext(frames))["event"]["start"]["pid"]
    while (await box.rpc("filesystem.Filesystem/Stat", {"path": "/tmp/done"}))[0] == 404:
        continue
    async with box.stream("process.Process/Connect", {"process": {"pid": pid}}) as frames:
        messages = [item async for item in frames]
    parts = [base64.b64decode(item.get("event", {}).get("data", {}).get("stdout", "")) for item in messages]
    assert b"".join(parts)[-5:] == b"xend\n"
    assert messages[-2]["event"]["end"]["exitCode"] == 3
    logs = (await box.call("GET", f"/v2/sandboxes/{box.id}/logs"))[1]["logs"]
    assert any("bytes of output unread" in entry["message"] for entry in logs)
    # What `e2b sandbox logs` of E2B's command line does with each line of the older route.
    lines = (await box.call("GET", f"/sandboxes/{box.id}/logs"))[1]["logs"]
    parsed = [json.loads(line["line"]) for line in lines]
    assert [one["message"] for one in parsed] == [entry["message"] for entry in logs]
    assert {(one["level"].upper(), one["logger"]) for one in parsed} == {("INFO", "process")}
    assert (await box.call("GET", f"/sandboxes/{box.id}/logs?start={10**14}"))[1]["logs"] == []
    assert (await box.call("GET", f"/sandboxes/{box.id}/logs?start=now"))[0] == 400


async def test_two_clients_can_follow_one_command(server: E2bServer, wire: Callable[..., Any]) -> None:
    box = await wire(server.url).create()
    start = {"process": {"cmd": "/bin/cat", "args": []}, "stdin": True, "tag": "cat"}
    follow = {"process": {"tag": "cat"}}
    async with box.stream(START, start) as one, box.stream("process.Process/Connect", follow) as other:
        for frames in (one, other):
            assert "start" in (await anext(frames))["event"]
        text = base64.b64encode(b"hello").decode()
        await box.rpc("process.Process/SendInput", {**follow, "input": {"stdin": text}})
        for frames in (one, other):
            assert (await anext(frames))["event"]["data"]["stdout"] == text
        await box.rpc("process.Process/CloseStdin", follow)
        for frames in (one, other):
            assert [item async for item in frames][-1] == {"end": {}}


async def test_an_upload_is_aborted_when_its_client_disconnects(server: E2bServer, wire: Callable[..., Any]) -> None:
    box = await wire(server.url).create()
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"part"
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(box.files("POST", "/tmp/never", endless()))
    await begun.wait()
    task.cancel()
    await asyncio.wait((task,))
    while (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '/tmp/neve[r]'"))[0] != b"0\n":
        continue


async def crowd(server: E2bServer, client: Any, count: int) -> None:
    """Create sandboxes concurrently, run a command in each, and kill them, all concurrently."""
    boxes = await asyncio.gather(*(client.create(metadata={"n": str(number)}) for number in range(count)))
    outs = await asyncio.gather(*(box.run(f"sleep 0.2; echo {n}") for n, box in enumerate(boxes)))
    assert [out for out, _ in outs] == [f"{n}\n".encode() for n in range(count)]
    ends = await asyncio.gather(*(client.call("DELETE", f"/sandboxes/{box.id}") for box in boxes))
    assert {status for status, _, _ in ends} == {204}


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_sandboxes_run_concurrently(wire: Callable[..., Any], count: int) -> None:
    async with LocalProvider(LocalSandboxConfig(max_live=count)) as local, E2bServer(local) as server:
        await crowd(server, wire(server.url), count)
        assert await local.list() == []


@pytest.mark.whole
def test_the_program_shuts_down_on_a_signal(tmp_path: Path) -> None:
    headrace = str(Path(sys.executable).with_name("headrace"))
    write_private(tmp_path / "keys", b"a:key-a\n")
    (tmp_path / "images.toml").write_text('tools = "host"\n')
    options = ["--state", str(tmp_path / "state"), "--keys", str(tmp_path / "keys")]
    options += ["--image-map", str(tmp_path / "images.toml"), "--metadata-image-key", "acme/image"]
    with subprocess.Popen([headrace, "serve", "sandbox", *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        asyncio.run(stream_until_the_end(url, process))
        assert process.wait(30) == 0


async def stream_until_the_end(url: str, process: subprocess.Popen[str]) -> None:
    """At shutdown the stream of a followed command ends, and no connection hangs."""
    headers = {"X-API-Key": "key-a", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as http:
        body = json.dumps({"templateID": "base", "metadata": {"acme/image": "tools"}})
        async with http.post(f"{url}/v2/sandboxes", data=body, headers=headers) as reply:
            assert reply.status == 201
            box = await reply.json()
        named = {"E2b-Sandbox-Id": box["sandboxID"], "X-Access-Token": box["envdAccessToken"]}
        data = json.dumps(bash("sleep 69")).encode()
        framed = b"\0" + len(data).to_bytes(4, "big") + data
        named["Content-Type"] = "application/connect+json"
        async with http.post(f"{url}/{START}", data=framed, headers=named) as reply:
            await reply.content.readexactly(5)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(aiohttp.ClientError):
                await reply.content.read()


@pytest.mark.whole
async def test_a_server_recovers_the_sandboxes_of_its_killed_predecessor(
    tmp_path: Path, wire: Callable[..., Any]
) -> None:
    headrace = str(Path(sys.executable).with_name("headrace"))
    command = [headrace, "serve", "sandbox", "--state", str(tmp_path / "state")]
    box = None
    ends = [("--keep-sandboxes", signal.SIGKILL), ("--keep-sandboxes", signal.SIGTERM), ("", signal.SIGTERM), ("", 0)]
    for option, number in ends:
        server = await asyncio.create_subprocess_exec(*command, *filter(None, [option]), stdout=subprocess.PIPE)
        assert server.stdout is not None
        url = (await server.stdout.readline()).decode().strip()
        if box is None:
            box = await wire(url).create(timeout=600)
            await box.run("echo kept > /tmp/file")
        box.url = url
        if number:
            assert (await box.run("cat /tmp/file"))[0] == b"kept\n"
        else:
            # The one before ended in order and kept nothing.
            assert (await box.call("GET", "/v2/sandboxes"))[1] == []
        server.send_signal(number or signal.SIGTERM)
        await server.wait()


@pytest.mark.whole
def test_invalid_options_print_one_line_and_exit_with_code_2(tmp_path: Path) -> None:
    headrace = str(Path(sys.executable).with_name("headrace"))
    (tmp_path / "bad.toml").write_text("a = {b = 1}\n")
    for options in (["--host", "0.0.0.0"], ["--image-map", str(tmp_path / "bad.toml")]):
        done = subprocess.run(
            [headrace, "serve", "sandbox", *options], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert options[0] in done.stderr


@pytest.mark.whole
def test_the_demo_ends_with_a_reward() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "demo_e2b"
    done = subprocess.run([script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["server", "sandbox", "edited;", "clean", "tests:", "reward"]
    assert lines[-1].endswith("reward 1.0")
