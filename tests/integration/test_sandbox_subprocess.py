"""The subprocess provider, which fulfils the same contract without protection."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.sandboxes.base import FrozenMount, Sandbox, SandboxSpec
from headrace.sandboxes.errors import (
    ExecTimeout,
    FrozenPathRefused,
    ImageUnknown,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
)
from headrace.sandboxes.host.leftovers import run_label, sandboxes_left
from headrace.sandboxes.unprotected.provider import WARNING, SubprocessProvider


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[SubprocessProvider]:
    async with SubprocessProvider(tmp_path, label=run_label(tmp_path)) as provider:
        yield provider


async def test_commands_see_short_paths(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        "pwd; echo a > /workspace/f; cat /workspace/f $WORKSPACE/f; cat; echo e >&2; exit 5",
        stdin=b"text",
        timeout_s=30,
    )
    assert result.exit_code == 5
    assert result.stdout == b"/workspace\na\na\ntext"
    assert result.stderr == b"e\n"
    script = await sandbox.exec("bash -s; echo $A", stdin=b"cat /workspace/f", env={"A": "/workspace"}, timeout_s=30)
    assert script.stdout == b"a\n/workspace\n"
    capped = await sandbox.exec("head -c 5000000 /dev/zero", timeout_s=30, max_output_bytes=10)
    assert (capped.stdout, capped.truncated) == (bytes(10), True)


async def test_the_environment_of_the_host_is_not_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "leak")
    assert b"leak" not in (await sandbox.exec("env", timeout_s=30)).stdout


async def test_timeouts_and_cancellation_kill_processes_but_daemons_survive_a_finished_exec(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with pytest.raises(ExecTimeout):
        await sandbox.exec("setsid sleep 1000 & setsid bash -c 'sleep 1001 & sleep 1002'", timeout_s=0.3)
    assert sandboxes_left(tmp_path) == 0
    result = await sandbox.exec("echo said; (setsid sleep 1000 &)", timeout_s=60)
    assert result.stdout == b"said\n"
    assert sandboxes_left(tmp_path) == 1
    task = asyncio.create_task(sandbox.exec("touch /workspace/up; sleep 1000", timeout_s=600))
    await sandbox.exec("until test -e /workspace/up; do sleep 0.05; done", timeout_s=30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sandboxes_left(tmp_path) == 1
    await sandbox.kill()
    await sandbox.kill()
    assert sandboxes_left(tmp_path) == 0
    with pytest.raises(SandboxGone):
        await sandbox.exec("true", timeout_s=30)


async def test_files_round_trip_and_links_are_not_followed(sandbox: Sandbox) -> None:
    await sandbox.write_many({"/workspace/a/b": b"1", "/tmp/c": b""})
    assert await sandbox.read("/workspace/a/b", max_bytes=1) == b"1"
    await sandbox.exec("ln -s /etc/passwd /workspace/link; mkfifo /workspace/fifo", timeout_s=30)
    for path in ("/workspace/link", "/workspace/fifo", "/workspace/none", "/workspace/a", "/etc/passwd"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path, max_bytes=1 << 20)
        with pytest.raises(SandboxFileError):
            await sandbox.read("/workspace/a/b", max_bytes=0)
    for path in ("/workspace/link", "/workspace/fifo", "/workspace/a", "/etc/headrace-planted"):
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, b"x")


async def test_files_of_a_frozen_sandbox_can_be_mounted_but_links_are_refused(provider: SubprocessProvider) -> None:
    ref = await provider.create(SandboxSpec())
    sandbox = await provider.attach(ref)
    await sandbox.exec(
        "echo data > /workspace/f; ln -s /etc /tmp/l; setsid sleep 1000 > /dev/null 2>&1 &", timeout_s=30
    )
    with pytest.raises(SpecRefused):
        await provider.create(SandboxSpec(mounts=(FrozenMount(source=ref.id, path="/tmp", target="/x"),)))
    await sandbox.freeze()
    with pytest.raises(SandboxGone, match="frozen"):
        await sandbox.exec("true", timeout_s=30)
    mount = FrozenMount(source=ref.id, path="/workspace", target="/evidence/w")
    clean = await provider.attach(await provider.create(SandboxSpec(mounts=(mount,))))
    assert (await clean.exec("cat /evidence/w/f", timeout_s=30)).stdout == b"data\n"
    for hostile in ("/tmp/l", "/tmp/l/passwd", "/none", "/tmp/../../secret"):
        with pytest.raises(FrozenPathRefused):
            await provider.create(SandboxSpec(mounts=(FrozenMount(source=ref.id, path=hostile, target="/x"),)))
    assert len(await provider.list()) == 2


async def test_leases_keys_and_secrets_are_enforced(provider: SubprocessProvider) -> None:
    spec = SandboxSpec(idempotency_key="k", ttl_s=3)
    ref = await provider.create(spec)
    assert await provider.create(spec) == ref
    with pytest.raises(SecretRefused):
        await (await provider.attach(replace(ref, secret="wrong"))).kill()
    kept = await provider.attach(await provider.create(SandboxSpec(ttl_s=30)))
    await kept.renew(600)
    with pytest.raises(SandboxGone):
        await (await provider.attach(ref)).exec("sleep 1000", timeout_s=60)
    assert [info.id for info in await provider.list()] == [kept.id]
    assert (await provider.create(spec)).id != ref.id
    with pytest.raises(ImageUnknown):
        await provider.create(SandboxSpec(image="other"))


async def test_another_process_can_attach(provider: SubprocessProvider) -> None:
    ref = await provider.create(SandboxSpec())
    script = """
import asyncio, pickle, sys
from headrace.sandboxes.unprotected.provider import SubprocessProvider
async def main():
    provider = SubprocessProvider()
    sandbox = await provider.attach(pickle.load(sys.stdin.buffer))
    await sandbox.exec("echo elsewhere > /workspace/f", timeout_s=30)
    await provider.aclose()
asyncio.run(main())
"""
    command = [sys.executable, "-c", script]
    await asyncio.to_thread(subprocess.run, command, input=pickle.dumps(ref), check=True, timeout=60)
    assert await (await provider.attach(ref)).read("/workspace/f", max_bytes=100) == b"elsewhere\n"


async def test_closing_the_provider_leaves_nothing_behind(tmp_path: Path) -> None:
    async with SubprocessProvider(tmp_path, label=run_label(tmp_path)) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        await sandbox.exec("setsid sleep 1000 > /dev/null 2>&1 &", timeout_s=30)
        async with asyncio.timeout(30):
            while sandboxes_left(tmp_path) != 1:  # noqa: ASYNC110 - what becomes another program shows no environment
                await asyncio.sleep(0.01)
    assert sandboxes_left(tmp_path) == 0
    assert list_folder(tmp_path) == []


def list_folder(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def test_the_warning_lists_missing_protection() -> None:
    assert SubprocessProvider.protects == ()
    assert "protects nothing" in WARNING
