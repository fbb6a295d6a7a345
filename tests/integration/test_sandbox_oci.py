# ruff: noqa: ASYNC110, ASYNC240 - small local files and programs; what ends elsewhere has no event
"""Containers of runc beyond the contract: images, limits, isolation and complete removal."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from benches import sandbox_peers as peers

from headrace.sandboxes.base import FrozenMount, Sandbox, SandboxSpec
from headrace.sandboxes.errors import BootFailed, CapacityExceeded, ImageRefused, NamespacesUnavailable, SpecRefused
from headrace.sandboxes.oci import runtime as oci_runtime
from headrace.sandboxes.oci.provider import OciProvider, OciSandboxConfig
from support import image_kit as kit

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(shutil.which("runc", path=oci_runtime._SEARCH_PATH) is None, reason="runc is not installed"),
]


@pytest.fixture
def config(tmp_path: Path) -> OciSandboxConfig:
    return OciSandboxConfig(image_folder=tmp_path / "images")


@pytest.fixture
async def provider(config: OciSandboxConfig) -> AsyncIterator[OciProvider]:
    async with OciProvider(config) as provider:
        yield provider


async def boot(provider: OciProvider, **spec: Any) -> Sandbox:
    return await provider.attach(await provider.create(SandboxSpec(**spec)))


async def output(sandbox: Sandbox, command: str, *, user: str = "root") -> str:
    result = await sandbox.exec(command, user=user, timeout_s=60)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


# Images


async def test_an_oci_image_boots(provider: OciProvider, tmp_path: Path) -> None:
    top = kit.tar([kit.file("etc/.wh.release"), kit.file("etc/added", b"top\n", uid=1000)])
    settings = {"Env": ["KIND=oci", "PATH=/usr/bin:/bin"]}
    layout = kit.Layout().image([kit.tar(kit.base_entries()), top], "v1", settings=settings).write(tmp_path / "layout")
    image = f"{layout}:v1"
    first, second = await asyncio.gather(boot(provider, image=image), boot(provider, image=image))
    seen = await output(first, "echo $KIND; ls /etc; cat /etc/added; pwd")
    assert seen == "oci\nadded\ngroup\npasswd\ntop\n/workspace"
    assert await output(first, "ls -ln /etc | while read -r m n u g r; do echo $u; done") == "1000\n0\n0"
    assert await output(first, "id -u", user="agent") == "1000"
    await output(first, "echo changed > /etc/added; rm /etc/group; touch /new")
    assert await output(first, "ls /etc /new; cat /etc/added") == "/new\n\n/etc:\nadded\npasswd\nchanged"
    assert await output(second, "ls /etc; cat /etc/added; ls /") == (
        "added\ngroup\npasswd\ntop\nbin\ndev\netc\nhome\nlib\nlib64\nproc\nroot\nsys\ntmp\nusr\nworkspace"
    )
    await first.write("/workspace/file", b"x", user="agent")
    assert await first.read("/workspace/file", max_bytes=1) == b"x"


async def test_frozen_data_is_readable_in_an_image_with_other_user_ids(provider: OciProvider, tmp_path: Path) -> None:
    (tmp_path / "base.tar").write_bytes(kit.tar(kit.base_entries()))
    agent = await boot(provider, image=str(tmp_path / "base.tar"))
    await output(agent, "echo x > /home/agent/private; exit 0", user="agent")
    await output(agent, "rm /etc/release; echo secret > /root/own")
    await agent.freeze()
    mounts = tuple(
        FrozenMount(source=agent.id, path=path, target=f"/frozen{path}") for path in ("/home/agent", "/root", "/etc")
    )
    checker = await boot(provider, image=str(tmp_path / "base.tar"), mounts=mounts)
    assert await output(checker, "cat /frozen/home/agent/private /frozen/root/own") == "x\nsecret"
    owners = "ls -n /frozen/home/agent | while read -r m n u r; do echo $u; done"
    assert await output(checker, owners) == "1000"
    assert await output(checker, "ls /frozen/etc") == "group\npasswd"


async def test_an_invalid_image_is_refused(provider: OciProvider, tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"broken" * 1000)
    with pytest.raises(ImageRefused):
        await boot(provider, image=str(tmp_path / "broken.tar"))
    assert await provider.list() == []


# Isolation and limits


async def test_commands_run_with_the_expected_identity_and_capabilities(provider: OciProvider) -> None:
    sandbox = await boot(provider)
    assert await output(sandbox, "hostname; id -u; echo /sys/*") == "sandbox\n0\n/sys/*"
    inside, outside, count = (await output(sandbox, "cat /proc/self/uid_map")).split()
    assert (inside, count) == ("0", "65536")
    assert int(outside) >= 0x60000000
    status = "grep -E 'CapBnd|CapEff|NoNewPrivs|Seccomp:' /proc/self/status"
    assert (await output(sandbox, status)).split() == [
        *("CapEff:", "00000000000000fb", "CapBnd:", "00000000000000fb", "NoNewPrivs:", "1", "Seccomp:", "2"),
    ]
    agent = await output(sandbox, "grep CapEff /proc/self/status", user="agent")
    assert agent.split() == ["CapEff:", "0000000000000000"]


@pytest.mark.parametrize(
    "attempt",
    [
        "unshare --user --map-root-user true",
        "unshare --mount true",
        "umount /proc",
        "nsenter --target 1 --mount true",
        "echo x > /proc/sys/kernel/hostname",
        "dmesg",
        "hostname other",
        "head -c 1 /proc/kcore | grep -q .",
        "ls /proc/1/fd/0 && echo > /proc/1/fd/0",
    ],
)
async def test_root_in_the_sandbox_cannot_perform_forbidden_operations(shared: Sandbox, attempt: str) -> None:
    assert (await shared.exec(attempt, timeout_s=60)).exit_code != 0
    assert await output(shared, "echo alive") == "alive"


@pytest.fixture
async def shared(provider: OciProvider) -> Sandbox:
    return await boot(provider)


async def test_the_system_call_filter_blocks_forbidden_calls(shared: Sandbox) -> None:
    probe = """
import ctypes, errno, socket
for family in (1, 2, 10, 16, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM).close()
        print(family, "open")
    except OSError as error:
        print(family, errno.errorcode[error.errno])
libc = ctypes.CDLL(None, use_errno=True)
for number in (425, 321):
    print(number, libc.syscall(number, 8, ctypes.create_string_buffer(200)), errno.errorcode[ctypes.get_errno()])
"""
    result = await shared.exec("python3 -", stdin=probe.encode(), timeout_s=60)
    families = ["1 open", "2 open", "10 open", "16 open", "38 EAFNOSUPPORT", "40 EAFNOSUPPORT"]
    assert result.stdout.decode().splitlines() == [*families, "425 -1 EPERM", "321 -1 EPERM"], result


async def test_memory_is_limited_and_the_sandbox_survives(provider: OciProvider) -> None:
    sandbox = await boot(provider, memory_bytes=96 << 20)
    hog = "python3 -c 'x = bytearray(400 << 20)'"
    assert (await sandbox.exec(hog, timeout_s=60)).exit_code == 137
    usage = await sandbox.usage()
    assert usage.memory_limit_bytes == 96 << 20
    assert usage.oom_kills >= 1
    assert await output(sandbox, "echo alive") == "alive"


async def test_a_fork_bomb_is_contained(provider: OciProvider) -> None:
    sandbox = await boot(provider, pids=64, cpu=0.5)
    bomb = "f() { f | f & }; f 2>/dev/null; sleep 1000"
    await asyncio.gather(sandbox.exec(bomb, timeout_s=2), return_exceptions=True)
    assert (await sandbox.usage()).cpus == 0.5
    assert (await sandbox.usage()).processes < 10
    assert await output(sandbox, "echo alive") == "alive"


# Nothing is left


def traces(sandbox_id: str) -> list[str]:
    """Return all processes, files and cgroups of this host with the id of a sandbox in their name."""
    root = Path("/sys/fs/cgroup")
    groups = (folder / f"oci-headrace-{sandbox_id}" for folder in (root, *root.iterdir()))
    found = [str(group) for group in groups if group.exists()]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if sandbox_id in line]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.name != str(os.getpid()) and sandbox_id.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


async def wait_until_gone(*paths: Path) -> None:
    async with asyncio.timeout(60):
        while any(path.exists() for path in paths):
            await asyncio.sleep(0.05)


async def wait_until_traceless(sandbox_id: str) -> None:
    """Wait for the shell that removes a sandbox's folder, because its command line contains the id as well."""
    async with asyncio.timeout(60):
        while traces(sandbox_id):
            await asyncio.sleep(0.05)


async def test_a_killed_sandbox_leaves_nothing_behind(provider: OciProvider) -> None:
    ref = await provider.create(SandboxSpec())
    sandbox = await provider.attach(ref)
    await output(sandbox, "(sleep 1000 > /dev/null 2>&1 &)")
    assert traces(ref.id)
    assert not any(ref.id in line for line in Path("/proc/mounts").read_text().splitlines())
    await sandbox.kill()
    await wait_until_gone(Path(ref.endpoint))
    await wait_until_traceless(ref.id)


async def test_a_killed_frozen_sandbox_leaves_nothing_behind(provider: OciProvider) -> None:
    ref = await provider.create(SandboxSpec())
    sandbox = await provider.attach(ref)
    await sandbox.freeze()
    assert Path(ref.endpoint).exists()
    await sandbox.kill()
    assert not Path(ref.endpoint).exists()


async def test_a_cancelled_create_leaves_nothing_behind(provider: OciProvider) -> None:
    task = asyncio.create_task(provider.create(SandboxSpec()))
    assert provider._home is not None
    sandboxes = provider._home / "sandboxes"
    while not (found := list(sandboxes.glob("*/layer"))):
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_gone(found[0].parent)
    await wait_until_traceless(found[0].parent.name)
    assert await provider.list() == []


async def test_a_boot_refused_by_the_runtime_raises_a_typed_error(provider: OciProvider) -> None:
    with pytest.raises(BootFailed, match="runtime"):
        await provider.create(SandboxSpec(memory_bytes=4096))
    assert await provider.list() == []
    assert provider._home is not None
    await wait_until_gone(*(provider._home / "sandboxes").iterdir())


ORPHAN = """
import asyncio, sys
from pathlib import Path
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.oci.provider import OciProvider, OciSandboxConfig

async def main():
    provider = OciProvider(OciSandboxConfig(runtime_folder=Path(sys.argv[1])))
    await provider.start()
    for paused in (False, True):
        ref = await provider.create(SandboxSpec())
        sandbox = await provider.attach(ref)
        await sandbox.exec("(sleep 1000 > /dev/null 2>&1 &)", timeout_s=60)
        if paused:
            await sandbox.pause()
        print(ref.id, flush=True)
    print(provider._keeper.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can search; those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def orphan(open_folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[str], int]]:
    """Start a provider in a process of its own, with a running and a paused sandbox; returns (process, ids, keeper)."""
    command = (sys.executable, "-c", ORPHAN, str(open_folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ids = [process.stdout.readline().strip() for _ in range(2)]
        yield process, ids, int(process.stdout.readline())
        process.kill()


async def test_sandboxes_die_with_their_killed_provider(
    orphan: tuple[subprocess.Popen[str], list[str], int],
) -> None:
    process, ids, keeper = orphan
    descriptor = os.pidfd_open(keeper)
    assert all(traces(sandbox_id) for sandbox_id in ids)
    process.kill()
    with os.fdopen(descriptor):
        await asyncio.to_thread(wait_for_end, descriptor)
    assert [traces(sandbox_id) for sandbox_id in ids] == [[], []]


async def test_files_of_a_killed_provider_and_keeper_are_removed(
    orphan: tuple[subprocess.Popen[str], list[str], int], open_folder: Path
) -> None:
    process, ids, keeper = orphan
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    process.wait()
    assert any(traces(sandbox_id) for sandbox_id in ids)
    async with OciProvider(OciSandboxConfig(runtime_folder=open_folder)):
        assert [traces(sandbox_id) for sandbox_id in ids] == [[], []]
        assert len(list(open_folder.iterdir())) == 1
    assert list(open_folder.iterdir()) == []


def wait_for_end(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000)


async def test_a_dead_keeper_is_replaced(provider: OciProvider) -> None:
    sandbox = await boot(provider)
    assert provider._keeper is not None
    old = provider._keeper.pid
    os.kill(old, signal.SIGKILL)
    async with asyncio.timeout(60):
        while provider._keeper.alive:
            await asyncio.sleep(0.01)
    again = await boot(provider)
    assert await output(again, "echo alive") == "alive"
    assert [info.id for info in await provider.list()] == [again.id]
    assert traces(sandbox.id) == []


# Bad input


async def test_a_folder_that_is_not_searchable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(SpecRefused, match=r"chmod o\+x"):
        await OciProvider(OciSandboxConfig(runtime_folder=tmp_path / "run")).start()


async def test_a_missing_runtime_raises_an_error(config: OciSandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_runtime, "_SEARCH_PATH", "/nonexistent")
    with pytest.raises(NamespacesUnavailable, match="apt-get install runc"):
        await OciProvider(config).start()


@pytest.mark.parametrize("field", ["cpu", "memory_bytes", "disk_bytes", "pids", "ttl_s"])
async def test_non_positive_limits_are_refused(provider: OciProvider, field: str) -> None:
    for value in (0, -1):
        with pytest.raises(SpecRefused, match=field):
            await provider.create(SandboxSpec(**{field: value}))


async def test_the_number_of_sandboxes_is_limited(tmp_path: Path) -> None:
    async with OciProvider(OciSandboxConfig(max_sandboxes=1)) as provider:
        first = await boot(provider)
        with pytest.raises(CapacityExceeded):
            await boot(provider)
        await first.kill()
        await boot(provider)


# Peers


async def test_each_peer_measurement_returns_figures_or_a_reason() -> None:
    results = await peers.measure_peers(cycles=1, boots=2, widths=(1, 2))
    assert results.keys() == {"bwrap", "runc"}
    for result in results.values():
        if isinstance(result, str):
            assert "not" in result
        else:
            assert result.keys() == {"create_destroy_ms", "exec_p50_ms", "boots_per_s_c1", "boots_per_s_c2"}
            assert all(value > 0 for value in result.values())
