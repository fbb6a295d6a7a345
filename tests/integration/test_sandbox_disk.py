# ruff: noqa: ASYNC110 - nobody tells of the end of a loop device
"""File layers on disk: a hard size limit, images and snapshots as in memory, clean-up, and the watermark."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.sandboxes import doctor
from headrace.sandboxes.base import FrozenMount, Sandbox, SandboxSpec
from headrace.sandboxes.errors import BootFailed, NamespacesUnavailable, OutOfDisk
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces


@pytest.fixture(scope="module", autouse=True)
def _loop_devices() -> None:
    try:
        doctor.require_namespaces()
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    if not Path("/dev/loop-control").exists() or shutil.which("mkfs.ext4", path="/usr/sbin:/sbin") is None:
        pytest.skip("no loop devices or no mkfs.ext4 here")


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(layers_in=tmp_path / "layers")) as provider:
        yield provider


async def boot(provider: LocalProvider, **spec: object) -> Sandbox:
    return await provider.attach(await provider.create(SandboxSpec(**spec)))  # type: ignore[arg-type]


async def output(sandbox: Sandbox, command: str, *, user: str = "root") -> str:
    result = await sandbox.exec(command, user=user, timeout_s=60)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def taken_bytes(folder: Path) -> int:
    """Return by how much the free space of `folder`'s file system has shrunk, including unnamed files."""
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def loop_devices_of(folder: Path) -> list[str]:
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(backing.read_text())
        except OSError:
            continue
    return [name for name in found if name.startswith(str(folder))]


async def test_a_disk_layer_has_a_hard_size_limit_and_uses_no_memory(provider: LocalProvider) -> None:
    sandbox = await boot(provider, disk_bytes=64 << 20, memory_bytes=32 << 20)
    written = await sandbox.exec("head -c 200M /dev/zero > /tmp/file", timeout_s=60)
    assert b"No space left" in written.stderr
    usage = await sandbox.usage()
    assert 40 << 20 < usage.disk_bytes <= 64 << 20
    assert (await sandbox.exec("rm /tmp/file; echo fine", timeout_s=30)).stdout == b"fine\n"


async def test_a_sandbox_on_disk_supports_files_and_freezing(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    assert await output(sandbox, "ls -A / | tr '\\n' ' '; id -u; stat -c %U / /home/agent | tr '\\n' ' '") != ""
    assert "lost+found" not in await output(sandbox, "ls -A /")
    await sandbox.write("/workspace/file", b"text", user="agent")
    await sandbox.freeze()
    clean = await boot(provider, mounts=(FrozenMount(source=sandbox.id, path="/workspace", target="/mnt/w"),))
    assert await output(clean, "cat /mnt/w/file; stat -c %U /mnt/w/file") == "textagent"


async def test_disk_layers_support_snapshots_and_clones(provider: LocalProvider) -> None:
    prepared = await boot(provider)
    await output(prepared, "echo v1 > /opt/tool; chown agent /opt/tool")
    image = await prepared.snapshot()
    first, second = await asyncio.gather(boot(provider, image=image), boot(provider, image=image))
    await output(first, "echo v2 > /opt/tool")
    assert await output(second, "cat /opt/tool; stat -c %U /opt/tool") == "v1\nagent"


async def test_nothing_is_left_on_disk(provider: LocalProvider, tmp_path: Path) -> None:
    folder = tmp_path / "layers"
    sandboxes = await asyncio.gather(*(boot(provider) for _ in range(4)))
    await output(sandboxes[0], "head -c 20M /dev/urandom > /tmp/file")
    assert len(await asyncio.to_thread(loop_devices_of, folder)) == 4
    await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes[:2]))
    await gone(folder, 2)
    assert provider.launcher_pid is not None
    os.kill(provider.launcher_pid, signal.SIGKILL)
    await gone(folder, 0)
    assert {path.name for path in folder.iterdir()} == {"templates"}


async def gone(folder: Path, left: int) -> None:
    """Poll the list of devices: the kernel clears a device shortly after its last user, without any event."""
    async with asyncio.timeout(30):
        while len(await asyncio.to_thread(loop_devices_of, folder)) > left:
            await asyncio.sleep(0.02)


async def test_boots_are_refused_below_the_watermark(tmp_path: Path) -> None:
    for config in (
        LocalSandboxConfig(layers_in=tmp_path / "layers", min_free_bytes=1 << 60),
        LocalSandboxConfig(min_free_bytes=1 << 60),
    ):
        async with LocalProvider(config) as provider:
            with pytest.raises(OutOfDisk, match="min_free_bytes") as caught:
                await boot(provider)
            assert caught.value.transient
            assert await provider.list() == []


async def test_a_missing_mkfs_or_template_fails_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalProvider(LocalSandboxConfig(layers_in=tmp_path / "layers")) as provider:
        await boot(provider)
        [template] = (tmp_path / "layers/templates").iterdir()
        template.write_bytes(b"no file system")
        with pytest.raises(BootFailed):
            await boot(provider)
        assert len(await provider.list()) == 1
        await gone(tmp_path / "layers", 1)
