"""What all sandboxes hold of a host together: the largest holder ends, and what others hold is nobody's fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from support.small_host import run_on_small_host

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts over kernel totals need root"),
]

BEGIN: Final = """
import asyncio, os, resource
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import CapacityExceeded
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, 20_000))

async def boot(provider):
    return await provider.attach(await provider.create(SandboxSpec()))

async def boot_when_there_is_room(provider):
    while True:
        try:
            return await boot(provider)
        except CapacityExceeded:
            await asyncio.sleep(0.05)  # the launcher's next look, which tells nobody

async def hold(sandbox, how):
    process = await sandbox.spawn(["python3", "-c", how + HELD])
    await anext(process.output())
    return process

HELD = "\\nprint('held', flush=True)\\nimport signal\\nsignal.pause()"
"""
DESCRIPTORS: Final = """
import os
for _ in range({children} - 1):
    if os.fork() == 0:
        break
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(4000)]
"""
MAPPINGS: Final = """
import ctypes, os
for _ in range({children} - 1):
    if os.fork() == 0:
        break
c = ctypes.CDLL(None)
for _ in range(40000):
    file = os.open("/dev/shm/f", os.O_RDONLY | os.O_CREAT)
    c.mmap(None, 4096, 1, 1, file, 0)
    os.close(file)
"""


def open_files() -> int:
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])


@pytest.mark.parametrize(("way", "children"), [(DESCRIPTORS, 6), (MAPPINGS, 2)], ids=["descriptors", "mappings"])
def test_the_largest_holder_of_open_files_ends_and_its_neighbour_does_not(
    tmp_path: Path, way: str, children: int
) -> None:
    """Of its commands, only: the sandbox lives, and says so."""
    script = f"""{BEGIN}
async def main():
    async with LocalProvider(LocalSandboxConfig(max_live=8)) as provider:
        modest, hog = await boot(provider), await boot(provider)
        neighbour = await hold(modest, {DESCRIPTORS.format(children=1)!r})
        greedy = await hog.spawn(["python3", "-c", {way.format(children=children)!r} + HELD])
        print(await greedy.wait(), (await hog.usage()).limit_kills, (await modest.usage()).limit_kills)
        print((await hog.exec("echo works", timeout_s=30)).stdout.decode().strip())
        await neighbour.signal(15)
        print(await neighbour.wait())
        await boot_when_there_is_room(provider)
asyncio.run(main())
"""
    output = run_on_small_host(tmp_path, script, {"fs/file-max": (open_files() + 12_000) * 4 // 3})
    assert output.splitlines() == ["137 1 0", "works", "143"]


def test_new_boots_wait_while_others_hold_the_hosts_files(tmp_path: Path) -> None:
    script = f"""{BEGIN}
async def main():
    async with LocalProvider(LocalSandboxConfig(max_live=8)) as provider:
        first = await boot(provider)
        modest = await hold(first, {DESCRIPTORS.format(children=1)!r})
        ours = [os.open("/dev/null", os.O_RDONLY) for _ in range(14_000)]
        while True:
            try:
                second = await boot(provider)
                await second.kill()
            except CapacityExceeded as error:
                print(str(error).partition(" ")[2])
                break
        for one in ours:
            os.close(one)
        await boot_when_there_is_room(provider)
        await modest.signal(15)
        print(await modest.wait(), (await first.usage()).limit_kills)
asyncio.run(main())
"""
    allowed = open_files() + 12_000
    output = run_on_small_host(tmp_path, script, {"fs/file-max": allowed * 4 // 3})
    assert output.splitlines() == [
        f"files are open on this host, and new sandboxes need it to be below {allowed * 4 // 3 * 3 // 4}",
        "143 0",
    ]


FORKS: Final = """
import os, signal
for _ in range({children}):
    if os.fork() == 0:
        signal.pause()
"""


def test_the_largest_holder_of_processes_ends_and_its_neighbour_does_not(tmp_path: Path) -> None:
    script = f"""{BEGIN}
async def main():
    async with LocalProvider(LocalSandboxConfig(max_live=8)) as provider:
        hog, modest = await boot(provider), await boot(provider)
        greedy = await hold(hog, {FORKS.format(children=400)!r})
        neighbour = await hold(modest, {FORKS.format(children=200)!r})
        print(await greedy.wait(), (await hog.usage()).limit_kills)
        await neighbour.signal(15)
        print(await neighbour.wait(), (await modest.usage()).limit_kills)
asyncio.run(main())
"""
    output = run_on_small_host(tmp_path, script, {"kernel/threads-max": 900})
    assert output.splitlines() == ["137 1", "143 0"]
