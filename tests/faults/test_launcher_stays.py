"""Launcher that stays: it is adopted after its provider was killed, and otherwise ends within one lease."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.base import SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxError, SandboxGone, SpecRefused
from headrace.sandboxes.host.leftovers import sandboxes_left
from headrace.sandboxes.local import launcher_process
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces

PROVIDER = """
import asyncio, json, sys
from dataclasses import asdict
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
async def main():
    provider = LocalProvider(LocalSandboxConfig.model_validate_json(sys.argv[1]))
    await provider.start()
    ref = await provider.create(SandboxSpec(idempotency_key="key", labels={"holder": "one"}))
    sandbox = await provider.attach(ref)
    await sandbox.exec("echo kept > /tmp/file; setsid sleep 1000 &", timeout_s=30)
    await sandbox.renew(float(sys.argv[2]))
    print(json.dumps([provider.launcher_pid, asdict(ref)]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def killed_provider(config: LocalSandboxConfig, ttl_s: float = 60.0) -> tuple[int, SandboxRef]:
    """Kill a provider with one sandbox by SIGKILL and return the pid of its launcher and the ref of the sandbox."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROVIDER, config.model_dump_json(), str(ttl_s)), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        launcher, fields = json.loads(await process.stdout.readline())
    process.kill()
    await process.wait()
    return launcher, ref_from(fields)


def ref_from(fields: dict[str, Any]) -> SandboxRef:
    return SandboxRef(**{**fields, "id": SandboxId(fields["id"])})


async def ended(pid: int) -> None:
    loop = asyncio.get_running_loop()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        async with asyncio.timeout(60):
            await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def test_the_next_provider_adopts_the_launcher_and_its_sandboxes(config: LocalSandboxConfig) -> None:
    launcher, ref = await killed_provider(config)
    async with LocalProvider(config) as provider:
        assert provider.launcher_pid == launcher
        [info] = await provider.list()
        assert (info.id, info.labels, info.idempotency_key) == (ref.id, {"holder": "one"}, "key")
        adopted = await provider.attach(ref)
        assert (await adopted.exec("cat /tmp/file", timeout_s=30)).stdout == b"kept\n"
        assert await provider.create(SandboxSpec(idempotency_key="key")) == ref
        other = await provider.attach(await provider.create(SandboxSpec()))
        assert (await other.exec("true", timeout_s=30)).exit_code == 0
    await ended(launcher)
    with pytest.raises(SandboxGone):
        await adopted.exec("true", timeout_s=30)


async def test_an_unadopted_launcher_and_its_sandboxes_end_within_one_lease(
    config: LocalSandboxConfig, tmp_path: Path
) -> None:
    launcher, _ = await killed_provider(config, ttl_s=1.0)
    await ended(launcher)
    assert sandboxes_left(tmp_path) == 0


async def test_a_persistent_launcher_dies_with_its_owner(config: LocalSandboxConfig, tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec("sleep", "1000")
    launcher, _ = await killed_provider(config.model_copy(update={"owner_pid": owner.pid}))
    owner.kill()
    await owner.wait()
    await ended(launcher)
    assert sandboxes_left(tmp_path) == 0


async def test_concurrently_started_providers_share_one_launcher(config: LocalSandboxConfig) -> None:
    patient = config.model_copy(update={"idle_exit_s": 60})
    providers = [LocalProvider(patient) for _ in range(4)]
    await asyncio.gather(*(provider.start() for provider in providers))
    assert len({provider.launcher_pid for provider in providers}) == 1
    for provider in providers[1:]:
        await provider.detach()
    await providers[0].create(SandboxSpec())
    await providers[0].aclose()


async def test_a_dead_launcher_is_replaced(config: LocalSandboxConfig) -> None:
    launcher, ref = await killed_provider(config)
    os.kill(launcher, signal.SIGKILL)
    await ended(launcher)
    async with LocalProvider(config) as provider:
        assert provider.launcher_pid != launcher
        assert await provider.list() == []
        with pytest.raises(SandboxGone):
            await (await provider.attach(ref)).exec("true", timeout_s=30)


async def test_a_hung_launcher_is_killed_and_replaced(
    config: LocalSandboxConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_process, "_ADOPT_TIMEOUT_S", 0.5)
    launcher, ref = await killed_provider(config)
    os.kill(launcher, signal.SIGSTOP)
    try:
        async with LocalProvider(config) as provider:
            assert provider.launcher_pid != launcher
            assert ref.id not in {info.id for info in await provider.list()}
            await ended(launcher)
    finally:
        with suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGKILL)


async def test_detaching_leaves_the_launcher_running_unless_it_is_tied_to_its_owner(config: LocalSandboxConfig) -> None:
    provider = LocalProvider(config)
    await provider.start()
    ref = await provider.create(SandboxSpec())
    await provider.detach()
    async with LocalProvider(config) as other:
        assert [info.id for info in await other.list()] == [ref.id]
    async with LocalProvider() as tied:
        with pytest.raises(SpecRefused):
            await tied.detach()


async def test_a_folder_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(SandboxError, match="700"):
        await LocalProvider(LocalSandboxConfig(stays_in=folder)).start()


async def test_only_empty_folders_of_dead_launchers_are_swept(config: LocalSandboxConfig, tmp_path: Path) -> None:
    launcher, _ = await killed_provider(config.model_copy(update={"stays_in": tmp_path / "dead"}))
    os.kill(launcher, signal.SIGKILL)
    await ended(launcher)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("lock", "launcher.json", "work"):
        (foreign / name).touch()
    async with LocalProvider(config):
        assert not (tmp_path / "dead").exists()
        assert {path.name for path in foreign.iterdir()} == {"lock", "launcher.json", "work"}
