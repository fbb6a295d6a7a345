# ruff: noqa: ASYNC110 - small local files; what a peer does has no event here
"""The exec server and its client with lost responses, dead hosts, full pools and invalid input."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from headrace.actors.errors import ConfigError
from headrace.actors.run.exit_codes import EXIT_TRANSIENT
from headrace.actors.runtime.pools.config import RemoteSection, SandboxKind, SandboxSection
from headrace.actors.runtime.pools.providers import refuse_absent_images
from headrace.buffer.primitives.durable_files import write_private
from headrace.buffer.tasks.task import TaskId
from headrace.sandboxes.base import HostPort, Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import (
    CapacityExceeded,
    ExecResultLost,
    ImageUnknown,
    PermanentSandboxError,
    ProviderUnreachable,
    SandboxError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
)
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from headrace.serve.sandbox_servers.exec.server import ExecPart
from headrace.serve.tracing.tracing import traceparent_of
from support.cutting_proxy import cutting_proxy
from support.recorded_spans import recorded_spans

pytestmark = pytest.mark.namespaces
HEADRACE = str(Path(sys.executable).with_name("headrace"))
ALICE, BOB = "alice-secret", "bob-secret"


@asynccontextmanager
async def serving(local: LocalProvider, **settings: Any) -> AsyncIterator[str]:
    chosen = ServerSettings(serve_e2b=False, **settings)
    part = ExecPart(provider=local, settings=chosen, apis=frozenset({"exec", "dropin"}), lease_s=900)
    async with E2bServer(local, chosen, [part]) as server:
        yield server.url


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(max_sandboxes=8)) as local:
        yield local


@pytest.fixture
async def server(local: LocalProvider) -> AsyncIterator[str]:
    async with serving(local) as url:
        yield url


@pytest.fixture
async def proxy(server: str) -> AsyncIterator[Any]:
    async with cutting_proxy(server) as proxy:
        yield proxy


@pytest.fixture
async def remote(proxy: Any) -> AsyncIterator[RemoteProvider]:
    """A provider that connects through the proxy."""
    async with RemoteProvider(RemoteConfig(url=proxy.url)) as remote:
        yield remote


@pytest.fixture
async def sandbox(remote: RemoteProvider) -> Sandbox:
    return await remote.attach(await remote.create(SandboxSpec()))


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout_s=60)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


# Lost answers


async def test_an_exec_with_an_id_runs_once_despite_lost_responses(proxy: Any, sandbox: Sandbox) -> None:
    """F21."""
    proxy.cut(0, 1)
    result = await sandbox.exec("echo ran >> log; echo said; exit 3", timeout_s=60, exec_id="one")
    assert (result.exit_code, result.stdout) == (3, b"said\n")
    assert proxy.answers == 3
    assert await output(sandbox, "cat log") == "ran"


async def test_requests_name_the_span_that_makes_them_and_commands_do_not(
    proxy: Any, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded_spans(monkeypatch) as recorded, recorded.tracer.start_as_current_span("tool") as span:
        said = await output(
            sandbox, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; find / -xdev -name '*trace*parent*'"
        )
        process = await sandbox.spawn("env", timeout_s=60)
        spawned = b"".join([piece.data async for piece in process.output()])
        await process.wait()
    header = traceparent_of(span)
    assert proxy.requests.count(f"traceparent: {header}\r\n".encode()) >= 2
    _, trace_id, span_id, _ = header.split("-")
    assert "PATH=" in said and b"PATH=" in spawned
    for text in (said, spawned.decode()):
        assert trace_id not in text and span_id not in text and "traceparent" not in text.lower()


async def test_an_exec_may_ask_for_more_output_than_the_api_allows(sandbox: Sandbox) -> None:
    """The grader of repositories does."""
    result = await sandbox.exec("echo said", timeout_s=60, max_output_bytes=1 << 40)
    assert (result.stdout, result.truncated) == (b"said\n", False)


async def test_an_exec_without_an_id_is_not_repeated(proxy: Any, sandbox: Sandbox) -> None:
    proxy.cut(0)
    with pytest.raises(ProviderUnreachable):
        await sandbox.exec("echo ran >> log", timeout_s=60)
    assert await output(sandbox, "cat log") == "ran"


async def test_a_create_with_a_key_creates_one_sandbox_despite_lost_responses(
    proxy: Any, remote: RemoteProvider, local: LocalProvider
) -> None:
    proxy.cut(0, 1)
    ref = await remote.create(SandboxSpec(idempotency_key="once"))
    assert [info.id for info in await local.list()] == [ref.id]
    proxy.cut(*range(100))
    with pytest.raises(ProviderUnreachable):
        await remote.create(SandboxSpec(idempotency_key="once"))
    assert proxy.answers == RemoteConfig(url=proxy.url).retries.boot_attempts
    proxy.cut()
    assert len(await local.list()) == 1


async def test_process_streams_survive_lost_connections(proxy: Any, sandbox: Sandbox) -> None:
    proxy.cut(0)
    process = await sandbox.spawn("echo $$ >> starts; tee copy; exit 9", stdin=True)
    data = b"".join(b"%06d\n" % number for number in range(60_000))
    proxy.cut(*range(1, 1000, 4))

    async def write() -> None:
        await process.write_stdin(data)
        await process.close_stdin()

    async def read() -> bytes:
        return b"".join([piece.data async for piece in process.output()])

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        reading = group.create_task(read())
    assert reading.result() == data
    assert await process.wait() == 9
    proxy.cut()
    assert await output(sandbox, "wc -l < starts; wc -c < copy") == f"1\n{len(data)}"


async def test_files_and_a_snapshot_survive_lost_responses(
    proxy: Any, remote: RemoteProvider, sandbox: Sandbox, tmp_path: Path
) -> None:
    big = bytes(range(256)) * 16_384
    (tmp_path / "big").write_bytes(big)
    proxy.cut(0, 2, 4)
    await sandbox.write("/workspace/big", tmp_path / "big")
    await sandbox.write_many({"/workspace/a": b"1", "/workspace/b": b"2"})
    assert await sandbox.read("/workspace/big", max_bytes=len(big)) == big
    proxy.cut(0)
    image = await sandbox.snapshot()
    clone = await remote.attach(await remote.create(SandboxSpec(image=image)))
    assert await output(clone, "cat a b") == "12"
    assert image in await remote.images()


# Clients that leave


async def test_a_lost_connection_kills_the_command_unless_it_has_an_id(
    proxy: Any, sandbox: Sandbox, server: str
) -> None:
    waits = "touch up; until test -e go; do sleep 0.05; done"
    named = asyncio.create_task(sandbox.exec(waits, timeout_s=90, exec_id="x"))
    unnamed = asyncio.create_task(sandbox.exec("touch up2; setsid sleep 1000 & sleep 1000", timeout_s=90))
    await output(sandbox, "until test -e up && test -e up2; do sleep 0.05; done")
    proxy.drop()
    with pytest.raises(ProviderUnreachable):
        await unnamed
    await output(sandbox, "while pgrep -f '[s]leep 1000'; do sleep 0.05; done >&2")
    await output(sandbox, "touch go")
    assert (await named).exit_code == 0


async def test_a_cancelled_create_leaves_nothing_behind(local: LocalProvider, remote: RemoteProvider) -> None:
    for key in ("", "key"):
        creating = asyncio.create_task(remote.create(SandboxSpec(idempotency_key=key)))
        while not await local.list() and not creating.done():
            await asyncio.sleep(0)
        if creating.cancel():
            with pytest.raises(asyncio.CancelledError):
                await creating
        else:
            await (await remote.attach(creating.result())).kill()
    await remote.detach()
    async with asyncio.timeout(60):
        while await local.list():
            await asyncio.sleep(0.02)


async def test_an_exhausted_connection_pool_does_not_delay_a_kill(server: str) -> None:
    async with RemoteProvider(RemoteConfig(url=server, connections=2)) as remote:
        ref = await remote.create(SandboxSpec())
        sandbox = await remote.attach(ref)
        running = [asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=600)) for _ in range(3)]
        waiting = asyncio.create_task(remote.create(SandboxSpec()))
        while (await sandbox.usage()).processes < 3:
            await asyncio.sleep(0.02)
        await sandbox.renew(100)
        assert [info.id for info in await remote.list()] == [ref.id]
        await sandbox.kill()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, SandboxGone)
        await waiting


# What is no answer, and what is refused


@asynccontextmanager
async def answering(text: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that reads a request's head and responds with `text`, with the heads that it has read."""
    heads: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(text)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_gateway_error_is_reported_as_ambiguous(status: int) -> None:
    text = b"HTTP/1.1 %d Bad\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops" % status
    async with answering(text) as (url, heads):
        remote = RemoteProvider(RemoteConfig(url=url))
        ref = SandboxRef(provider="remote", id=SandboxId("x"), endpoint=url, secret="s")
        sandbox = await remote.attach(ref)
        with pytest.raises(ProviderUnreachable):
            await sandbox.exec("true", timeout_s=5)
        assert len(heads) == 1
        with pytest.raises(ProviderUnreachable):
            await sandbox.exec("true", timeout_s=5, exec_id="again")
        assert len(heads) == 5
        await remote.detach()


async def test_connecting_to_another_kind_of_server_is_a_permanent_error() -> None:
    async with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno") as (url, heads):
        with pytest.raises(PermanentSandboxError, match="no exec server"):
            await RemoteProvider(RemoteConfig(url=url)).__aenter__()
        assert len(heads) == 1


async def test_a_full_host_returns_a_retry_delay(remote: RemoteProvider) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(remote.create(SandboxSpec()))
    with pytest.raises(CapacityExceeded) as caught:
        await remote.create(SandboxSpec())
    assert caught.value.retry_after_s > 0


async def test_a_client_cannot_boot_a_host_path(remote: RemoteProvider, tmp_path: Path) -> None:
    for image in ("/", str(tmp_path), "debootstrap:bookworm", "snapshot:other"):
        with pytest.raises(ImageUnknown):
            await remote.create(SandboxSpec(image=image))


async def test_images_missing_on_all_hosts_are_refused_when_a_run_starts(local: LocalProvider) -> None:
    def refuse(*urls: str) -> None:
        section = SandboxSection(provider=SandboxKind.REMOTE, remote=RemoteSection(urls=urls))
        refuse_absent_images(section, {image: TaskId(f"in {image}") for image in ("host", "task")})

    async with serving(local) as without, serving(local, images=ImageMap({"task": "host"})) as having:
        with pytest.raises(ConfigError, match=r"task in task: image 'task': no host .* has it; they have base"):
            await asyncio.to_thread(refuse, without)
        await asyncio.to_thread(refuse, without, having)
    # Nobody answers: it may be there.
    await asyncio.to_thread(refuse, without)


@asynccontextmanager
async def keyed(local: LocalProvider, folder: Path) -> AsyncIterator[tuple[str, dict[str, RemoteProvider]]]:
    keys = folder / "keys"
    write_private(keys, f"alice:{ALICE}\nbob:{BOB}:1\n".encode())
    async with serving(local, keys=load_keys(keys), images=ImageMap({"task": "host"})) as url:
        remotes = {}
        for name, key in (("alice", ALICE), ("bob", BOB)):
            write_private(folder / name, f"{key}\n".encode())
            remotes[name] = RemoteProvider(RemoteConfig(url=url, key_file=folder / name))
            await remotes[name].start()
        yield url, remotes
        for remote in remotes.values():
            await remote.aclose()


async def test_a_key_gives_access_only_to_its_own_sandboxes(local: LocalProvider, tmp_path: Path) -> None:
    async with keyed(local, tmp_path) as (url, remotes):
        alice, bob = remotes["alice"], remotes["bob"]
        ref = await alice.create(SandboxSpec(image="task", idempotency_key="same", labels={"a": "b"}))
        other = await bob.create(SandboxSpec(image="task", idempotency_key="same"))
        assert ref.id != other.id
        (info,) = await alice.list()
        assert (info.id, dict(info.labels), info.idempotency_key) == (ref.id, {"a": "b"}, "same")
        await bob.destroy(ref.id)
        assert await output(await bob.attach(ref), "echo alive") == "alive"
        with pytest.raises(SecretRefused):
            await (await alice.attach(replace(ref, secret=ALICE))).kill()
        with pytest.raises(CapacityExceeded, match="bob"):
            await bob.create(SandboxSpec())
        await alice.destroy(ref.id)
        await alice.destroy(ref.id)
        assert await alice.list() == []
        with pytest.raises(SecretRefused):
            await RemoteProvider(RemoteConfig(url=url)).__aenter__()


BAD_BODIES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/sandboxes", b"{"),
    ("POST", "/v1/sandboxes", []),
    ("POST", "/v1/sandboxes", {"image": 5}),
    ("POST", "/v1/sandboxes", {"ttl_s": -1}),
    ("POST", "/v1/sandboxes", {"network": "host"}),
    ("POST", "/v1/sandboxes", {"unknown": 1}),
    ("POST", "/v1/sandboxes", {"mounts": [{"source": "x", "path": "/a", "target": "/b"}]}),
    ("POST", "{one}/exec", {"command": "true"}),
    ("POST", "{one}/exec", {"command": "true", "timeout_s": "Infinity"}),
    ("POST", "{one}/exec", {"command": "a\0b", "timeout_s": 1}),
    ("POST", "{one}/exec", {"command": "true", "timeout_s": 1, "env": {"A=B": "c"}}),
    ("POST", "{one}/exec", {"command": "true", "timeout_s": 1, "stdin": "*"}),
    ("POST", "{one}/exec", {"command": "true", "timeout_s": 1, "max_output_bytes": 1 << 40}),
    ("POST", "{one}/processes", {"spawn_id": "../x", "command": "true"}),
    ("GET", "{one}/processes/missing/output?after=0", None),
    ("POST", "{one}/processes/missing/signal", {"number": 99}),
    ("POST", "{one}/read?path=/etc/passwd&max_bytes=-1", None),
    ("POST", "{one}/read?path=/workspace/%00&max_bytes=1", None),
    ("PUT", "{one}/files", b"\xff\xff\xff\xff{}"),
    ("PUT", "{one}/file?path=relative", b"x"),
    ("POST", "{one}/renew", {"ttl_s": 0}),
)


async def test_invalid_input_is_a_typed_permanent_error_and_creates_no_sandbox(
    server: str, local: LocalProvider
) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{server}/v1/sandboxes", json={}) as response:
            box = await response.json()
        secret = {"Authorization": f"Bearer {box['secret']}"}
        for method, path, body in BAD_BODIES:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            where = server + path.format(one=f"/v1/sandboxes/{box['id']}")
            async with http.request(method, where, data=data, headers=secret) as response:
                document = await response.json()
                assert response.status in (400, 422), (path, body, document)
                assert document["error"] in ("SpecRefused", "SandboxFileError", "ExecResultLost"), (path, document)
                assert document["transient"] is False
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic eA=="}):
            one = f"{server}/v1/sandboxes/{box['id']}"
            async with http.post(f"{one}/exec", json={"command": "x", "timeout_s": 1}, headers=headers) as response:
                assert (response.status, (await response.json())["error"]) == (401, "SecretRefused")
        async with http.delete(f"{server}/v1/sandboxes/{'z' * 5000}", headers=secret) as response:
            assert response.status == 200
    assert [info.id for info in await local.list()] == [box["id"]]


# A service of the client's host


FETCH = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=20)
for path in sys.argv[1:]:
    connection.request("POST", path, body=b"x" * 600000)
    answer = connection.getresponse()
    print(answer.status, len(answer.read()))
"""


@asynccontextmanager
async def service() -> AsyncIterator[tuple[HostPort, list[str]]]:
    paths: list[str] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(request.raw_path)
        return web.Response(body=await request.content.read() * 2)

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        yield HostPort(host=host, port=port), paths
    finally:
        await runner.cleanup()


async def test_a_client_service_is_reachable_only_below_its_prefix(proxy: Any, sandbox: Sandbox) -> None:
    await sandbox.write("/workspace/fetch.py", FETCH.encode())
    async with service() as (target, paths):
        async with sandbox.expose(8080, target, "/s/one"):
            fetched = await asyncio.gather(
                *(output(sandbox, f"python3 fetch.py /s/one/a{n} /s/two /s/one/b{n}") for n in range(4))
            )
            assert [line.split()[0] for line in fetched[0].splitlines()] == ["200", "403", "200"]
            assert all(text.count("200 1200000") == 2 for text in fetched)
            assert sorted(paths) == sorted(f"/s/one/{name}{n}" for name in "ab" for n in range(4))
            with pytest.raises(SpecRefused):
                async with sandbox.expose(8080, target, "/s/one"):
                    pass
            proxy.drop()
            again = "until python3 fetch.py /s/one/c 2> /dev/null; do sleep 0.1; done"
            # Named, since an idle connection of the client is lost as well.
            assert (await sandbox.exec(again, timeout_s=60, exec_id="again")).stdout == b"200 1200000\n"
        assert (await sandbox.exec("python3 fetch.py /s/one/d", timeout_s=60)).exit_code != 0
        with pytest.raises(SandboxGone):
            await sandbox.kill()
            async with sandbox.expose(8080, target, "/s/one"):
                pass


# Servers that die


@asynccontextmanager
async def child(*options: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Run `headrace serve sandbox` as a process; yields its URL."""
    command = [HEADRACE, "serve", "sandbox", *options]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process, (await asyncio.to_thread(process.stdout.readline)).strip()
        finally:
            if process.poll() is None:
                process.terminate()
            await asyncio.to_thread(process.wait, 60)


@pytest.mark.whole
async def test_a_server_recovers_sandboxes_after_its_predecessor_was_killed(tmp_path: Path) -> None:
    options = ("--api", "exec,dropin", "--state", str(tmp_path / "state"))
    async with child(*options) as (first, url), aiohttp.ClientSession() as http:
        remote = RemoteProvider(RemoteConfig(url=url))
        await remote.start()
        spec = SandboxSpec(idempotency_key="kept")
        ref = await remote.create(spec)
        sandbox = await remote.attach(ref)
        done = await sandbox.exec("echo ran >> log; date +%N", timeout_s=60, exec_id="one")
        process = await sandbox.spawn("sleep 1000")
        async with http.post(f"{url}/allocate", json={"image": "host"}) as response:
            lease = await response.json()
        first.send_signal(signal.SIGKILL)
        await asyncio.to_thread(first.wait, 60)
        async with child(*options, "--port", url.rpartition(":")[2]) as (_, again):
            assert again == url
            assert (await remote.create(spec)) == ref
            assert (await sandbox.exec("echo ran >> log", timeout_s=60, exec_id="one")).stdout == done.stdout
            assert await output(sandbox, "cat log") == "ran"
            with pytest.raises(ExecResultLost):
                await process.wait()
            body = {"lease_id": lease["lease_id"], "command": "echo alive", "cwd": "/"}
            async with http.post(f"{url}/exec", json=body) as response:
                assert await response.json() == {"ok": True, "returncode": 0, "output": "alive\n"}
            await remote.aclose()


@pytest.mark.whole
async def test_a_dead_host_receives_no_requests_until_it_recovers() -> None:
    async with child("--api", "exec") as (dying, a), child("--api", "exec") as (_, b):
        hosts = ("--host-url", a, "--host-url", b)
        async with child("--api", "exec", *hosts) as (_, url), RemoteProvider(RemoteConfig(url=url)) as remote:
            refs = await asyncio.gather(*(remote.create(SandboxSpec()) for _ in range(4)))
            assert await counts(a, b) == [2, 2]
            dying.send_signal(signal.SIGKILL)
            await asyncio.to_thread(dying.wait, 60)
            more = await asyncio.gather(*(remote.create(SandboxSpec(idempotency_key=f"k{n}")) for n in range(4)))
            assert (await counts(b)) == [6]
            assert await output(await remote.attach(more[0]), "echo alive") == "alive"
            states = [await answers(await remote.attach(ref)) for ref in refs]
            assert sorted(states) == [False, False, True, True]
            async with child("--api", "exec", "--port", a.rpartition(":")[2]):
                async with asyncio.timeout(60):
                    while await counts(a) == [0]:
                        await remote.create(SandboxSpec())
                        await asyncio.sleep(0.2)


async def counts(*urls: str) -> list[int]:
    found = []
    for url in urls:
        remote = RemoteProvider(RemoteConfig(url=url))
        found.append(len(await remote.list()))
        await remote.detach()
    return found


async def answers(sandbox: Sandbox) -> bool:
    try:
        return await output(sandbox, "echo alive") == "alive"
    except SandboxError:
        return False


@pytest.mark.whole
async def test_frozen_data_is_mounted_on_its_own_host_only() -> None:
    from headrace.sandboxes.base import FrozenMount

    async with child("--api", "exec") as (_, a), child("--api", "exec") as (_, b):
        hosts = ("--host-url", a, "--host-url", b)
        async with child("--api", "exec", *hosts) as (_, url), RemoteProvider(RemoteConfig(url=url)) as remote:
            for number in range(3):
                agent = await remote.attach(await remote.create(SandboxSpec()))
                await output(agent, f"mkdir data; echo {number} > data/file")
                await agent.freeze()
                mount = FrozenMount(source=agent.id, path="/workspace/data", target="/frozen")
                checker = await remote.attach(await remote.create(SandboxSpec(mounts=(mount,))))
                assert await output(checker, "cat /frozen/file") == str(number)


@pytest.mark.whole
async def test_all_three_apis_work_with_remote_hosts(wire: Callable[..., Any]) -> None:
    async with child("--api", "exec") as (_, a), child("--host-url", a) as (_, url), aiohttp.ClientSession() as http:
        box = await wire(url).create()
        out, end = await box.run("echo said; exit 3")
        assert (out, end["exitCode"]) == (b"said\n", 3)
        async with http.post(f"{url}/allocate", json={"image": "base"}) as response:
            lease = await response.json()
        body = {"lease_id": lease["lease_id"], "command": "sleep 1000", "timeout": 1}
        async with http.post(f"{url}/exec", json=body) as response:
            reply = {"ok": True, "returncode": -1, "output": "Command timed out after 1s"}
            assert await response.json() == reply
        async with http.post(f"{url}/close", json={"lease_id": lease["lease_id"]}) as response:
            assert await response.json() == {"ok": True}
        assert await counts(a, url) == [1, 0]


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        (("--api", "e2b,nothing"), 2),
        (("--api", "dropin", "--lease-s", "0"), 2),
        (("--host-url", "ftp://x"), 2),
        # The host may come back.
        (("--host-url", "http://127.0.0.1:9"), EXIT_TRANSIENT),
        (("--host", "0.0.0.0"), 2),
        (("--provider", "oci"), 2),
        (("--provider", "subprocess"), 2),
    ],
)
def test_invalid_options_print_a_one_line_message(options: tuple[str, ...], exit_code: int) -> None:
    command = [HEADRACE, "serve", "sandbox", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == exit_code
    assert done.stderr.splitlines()[-1].startswith("headrace: "), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("limit", [{"memory_bytes": 1 << 45}, {"pids": 10**9}])
async def test_a_request_above_the_limit_of_its_key_is_refused_permanently(server: str, limit: dict[str, int]) -> None:
    """A client that mistakes the refusal for a lack of room would retry for ever."""
    async with aiohttp.ClientSession() as session, session.post(f"{server}/v1/sandboxes", json=limit) as response:
        document = await response.json()
    assert (response.status, document["error"], document["transient"]) == (422, "SpecRefused", False)
    assert f"{next(iter(limit))}={next(iter(limit.values()))} is above the ceiling" in document["message"]
