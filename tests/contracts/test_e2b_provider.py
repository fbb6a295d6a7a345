"""The `e2b` provider beyond the contract of all providers, over the public SDK, against our own server."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.base import Feature, FrozenMount, Sandbox, SandboxId, SandboxSpec, TerminalSize
from headrace.sandboxes.e2b.provider import E2bConfig, E2bProvider
from headrace.sandboxes.errors import (
    FrozenPathRefused,
    ImageUnknown,
    ProviderUnreachable,
    RateLimited,
    SandboxGone,
    SecretRefused,
    SpecRefused,
    Unsupported,
)
from headrace.sandboxes.local.provider import LocalProvider
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from support.cutting_proxy import cutting_proxy
from support.recorded_spans import recorded_spans

pytestmark = pytest.mark.namespaces
KEY = "e2b_" + "1" * 40


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[E2bServer]:
    keys = tmp_path / "keys"
    write_private(keys, f"team:{KEY}:3\n".encode())
    settings = ServerSettings(keys=load_keys(keys), images=ImageMap({"task-7": "host"}, "acme/image"))
    async with LocalProvider() as local, E2bServer(local, settings) as server:
        yield server


@pytest.fixture
def config(server: E2bServer, tmp_path: Path) -> E2bConfig:
    (tmp_path / "key").write_text(f"{KEY}\n")
    return E2bConfig(api_url=server.url, api_key_file=tmp_path / "key", metadata_image_key="acme/image")


@pytest.fixture
async def provider(config: E2bConfig) -> AsyncIterator[E2bProvider]:
    async with E2bProvider(config) as provider:
        yield provider


async def test_output_is_held_until_it_is_read(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("for i in {1..8}; do head -c 1000000 /dev/zero | tr '\\0' x; done; echo done")
    total, last = 0, b""
    async for piece in process.output():
        total += len(piece.data)
        last = piece.data
    assert (total, last[-5:]) == (8_000_005, b"done\n")


async def test_any_process_can_attach_with_a_ref(provider: E2bProvider, config: E2bConfig) -> None:
    ref = pickle.loads(pickle.dumps(await provider.create(SandboxSpec(image="task-7"))))
    async with E2bProvider(config) as other:
        sandbox = await other.attach(ref)
        assert (await sandbox.exec("echo here", timeout_s=20)).stdout == b"here\n"
        await sandbox.renew(900)
        await sandbox.kill()
        await sandbox.kill()
        for call in (sandbox.exec("true", timeout_s=5), sandbox.renew(5), sandbox.read("/etc/passwd", max_bytes=9999)):
            with pytest.raises(SandboxGone):
                await call


async def test_lists_contain_labels_and_keys(provider: E2bProvider) -> None:
    spec = SandboxSpec(ttl_s=200, idempotency_key="Run 1/é", labels={"run": "1"})
    ref = await provider.create(spec)
    assert (await provider.create(spec)).id == ref.id
    [info] = await provider.list()
    assert (info.id, info.state, info.labels) == (ref.id, "running", {"run": "1"})
    assert info.idempotency_key == spec.idempotency_key
    assert 100 < info.expires_in_s <= 200


async def test_a_sandbox_can_be_paused_and_resumed(provider: E2bProvider, sandbox: Sandbox) -> None:
    assert provider.features == {Feature.FREEZE, Feature.SPAWN, Feature.PAUSE}
    await sandbox.pause()
    await sandbox.pause()
    assert [info.state for info in await provider.list()] == ["paused"]
    await sandbox.resume()
    await sandbox.resume()
    assert (await sandbox.exec("echo on", timeout_s=20)).stdout == b"on\n"


async def test_terminals_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(Unsupported):
        await sandbox.spawn("true", terminal=TerminalSize())


async def test_refusals_raise_typed_errors(provider: E2bProvider, config: E2bConfig, tmp_path: Path) -> None:
    with pytest.raises(ImageUnknown):
        await provider.create(SandboxSpec(image="no-such-image"))
    with pytest.raises(SpecRefused):
        await provider.create(SandboxSpec(memory_bytes=1 << 30))
    with pytest.raises(SpecRefused):
        await provider.create(SandboxSpec(mounts=(FrozenMount(source=SandboxId("x"), path="/a", target="/b"),)))
    (tmp_path / "wrong").write_text("e2b_" + "2" * 40)
    wrong = E2bProvider(config.model_copy(update={"api_key_file": tmp_path / "wrong"}))
    with pytest.raises(SecretRefused):
        await wrong.list()
    with pytest.raises(SecretRefused):
        await E2bProvider(config.model_copy(update={"api_key_file": tmp_path / "missing"})).list()
    # Not the key in the environment in its place.
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SecretRefused, match="it is empty"):
        await E2bProvider(config.model_copy(update={"api_key_file": tmp_path / "empty"})).list()
    nobody = E2bProvider(config.model_copy(update={"api_url": "http://127.0.0.1:9"}))
    with pytest.raises(ProviderUnreachable):
        await nobody.create(SandboxSpec())


async def test_a_full_account_is_rate_limited(provider: E2bProvider) -> None:
    for _ in range(3):
        await provider.create(SandboxSpec())
    with pytest.raises(RateLimited) as caught:
        await provider.create(SandboxSpec())
    assert caught.value.retry_after_s > 0


async def test_a_cancelled_create_leaves_nothing_behind(provider: E2bProvider) -> None:
    task = asyncio.create_task(provider.create(SandboxSpec()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await provider.aclose()
    assert await provider.list() == []


async def test_an_evaluation_gets_a_copy_of_the_agents_files(provider: E2bProvider) -> None:
    agent = await provider.attach(await provider.create(SandboxSpec()))
    await agent.exec(
        "mkdir -p data/sub; echo result > data/sub/file; chmod 4777 data/sub/file; mkfifo data/pipe; "
        "ln -s /etc/passwd data/link; ln -s /etc away; echo one > single; (setsid sleep 81 >/dev/null 2>&1 &)",
        timeout_s=20,
    )
    await agent.freeze()
    await agent.freeze()
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 8[1]'"
    assert (await agent.exec(look, timeout_s=20)).stdout == b"0\n"
    folder = FrozenMount(source=agent.id, path="/workspace/data", target="/frozen/data")
    single = FrozenMount(source=agent.id, path="/workspace/single", target="/frozen/one")
    checker = await provider.attach(await provider.create(SandboxSpec(mounts=(folder, single))))
    found = "cd /frozen; cat data/sub/file one; readlink data/link; stat -c '%a %U' data/sub data/sub/file; ls data"
    lines = (await checker.exec(found, timeout_s=20)).stdout.decode().splitlines()
    assert lines == ["result", "one", "/etc/passwd", "555 root", "555 root", "link", "sub"]
    for path in ("/workspace/away", "/workspace/missing", "/workspace/away/passwd"):
        with pytest.raises(FrozenPathRefused):
            await provider.create(SandboxSpec(mounts=(replace(folder, path=path),)))
    for target in ("/proc/x", "/usr/x", "relative", "/a/../etc", "/"):
        with pytest.raises(SpecRefused):
            await provider.create(SandboxSpec(mounts=(replace(folder, target=target),)))
    assert len(await provider.list()) == 2, "a sandbox whose data could not be copied is killed"
    with pytest.raises(SpecRefused):
        await provider.create(SandboxSpec(mounts=(replace(folder, source=checker.id),)))


async def test_an_evaluation_copies_at_most_the_configured_bytes(config: E2bConfig) -> None:
    async with E2bProvider(config.model_copy(update={"max_frozen_bytes": 100_000})) as provider:
        agent = await provider.attach(await provider.create(SandboxSpec()))
        await agent.exec("mkdir data; head -c 99000 /dev/urandom > data/one", timeout_s=20)
        await agent.freeze()
        mount = FrozenMount(source=agent.id, path="/workspace/data", target="/frozen")
        checker = await provider.attach(await provider.create(SandboxSpec(mounts=(mount,))))
        assert (await checker.exec("wc -c < /frozen/one", timeout_s=20)).stdout == b"99000\n"
        await agent.exec("head -c 2000 /dev/urandom > data/two", timeout_s=20)
        with pytest.raises(FrozenPathRefused, match="more than 100000 bytes"):
            await provider.create(SandboxSpec(mounts=(mount,)))


async def test_each_request_names_the_span_that_it_serves(
    server: E2bServer, config: E2bConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded_spans(monkeypatch) as spans:
        async with cutting_proxy(server.url) as proxy:
            provider = E2bProvider(config.model_copy(update={"api_url": proxy.url}))
            with spans.tracer.start_as_current_span("rollout") as rollout:
                sandbox = await provider.attach(await provider.create(SandboxSpec()))
                assert (await sandbox.exec("env", timeout_s=20)).exit_code == 0
                await provider.destroy(sandbox.id)
            trace_id = f"{rollout.get_span_context().trace_id:032x}"
            sent = bytes(proxy.requests).lower()
            asked = sent.count(b" http/1.1\r\n")
            assert asked >= 3
            assert sent.count(f"\r\ntraceparent: 00-{trace_id}-".encode()) == asked
            proxy.requests.clear()
            await provider.list()
            assert b"traceparent" not in bytes(proxy.requests).lower()
