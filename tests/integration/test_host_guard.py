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
# The first thread of each process ends, and what another thread holds stays.
ZOMBIE: Final = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""
INHERITED: Final = """
import os
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1000)]
for _ in range({children} - 1):
    if os.fork() == 0:
        break
"""
MAPPINGS: Final = """
import ctypes, os
c = ctypes.CDLL(None)
for _ in range(20000):
    file = os.open("/dev/shm/f", os.O_RDONLY | os.O_CREAT)
    c.mmap(None, 4096, 1, 1, file, 0)
    os.close(file)
"""


TAKEN: Final = {
    "the host's programs": '[os.open("/dev/null", os.O_RDONLY) for _ in range(14_000)]',
    "mappings": f"await hold(second, {MAPPINGS!r})",
    "a paused sandbox": f"await hold(second, {DESCRIPTORS.format(children=2)!r}); await second.pause(); "
    'more = [os.open("/dev/null", os.O_RDONLY) for _ in range(4_000)]',
}
GIVEN_BACK: Final = {
    "the host's programs": "[os.close(one) for one in taken]",
    "mappings": "await second.kill()",
    "a paused sandbox": "await second.kill()",
}


def open_files() -> int:
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])


@pytest.mark.parametrize("then", ["", ZOMBIE], ids=["descriptors", "first threads ended"])
def test_the_largest_holder_of_open_files_ends_and_its_neighbours_do_not(tmp_path: Path, then: str) -> None:
    """Of its commands, only: the sandbox lives, and says so. Sixty workers of one server hold its files once."""
    script = f"""{BEGIN}
async def main():
    async with LocalProvider(LocalSandboxConfig(max_live=8)) as provider:
        modest, server, hog = await boot(provider), await boot(provider), await boot(provider)
        neighbour = await hold(modest, {DESCRIPTORS.format(children=1)!r})
        workers = await hold(server, {INHERITED.format(children=60)!r})
        greedy = await hog.spawn(["python3", "-c", {(DESCRIPTORS.format(children=6) + then)!r} + HELD])
        print(await greedy.wait(), *[(await one.usage()).limit_kills for one in (hog, modest, server)])
        print((await hog.exec("echo works", timeout_s=30)).stdout.decode().strip())
        for one in (neighbour, workers):
            await one.signal(15)
            print(await one.wait())
        await boot_when_there_is_room(provider)
asyncio.run(main())
"""
    output = run_on_small_host(tmp_path, script, {"fs/file-max": (open_files() + 15_000) * 4 // 3})
    assert output.splitlines() == ["137 1 0 0", "works", "143", "143"]


@pytest.mark.parametrize("way", ["the host's programs", "mappings", "a paused sandbox"])
def test_new_boots_wait_while_nobody_is_known_to_hold_too_much(tmp_path: Path, way: str) -> None:
    script = f"""{BEGIN}
async def main():
    async with LocalProvider(LocalSandboxConfig(max_live=8)) as provider:
        first, second = await boot(provider), await boot(provider)
        modest = await hold(first, {DESCRIPTORS.format(children=1)!r})
        taken = {TAKEN[way]}
        while True:
            try:
                await (await boot(provider)).kill()
            except CapacityExceeded as error:
                print(str(error).partition(" ")[2])
                break
        {GIVEN_BACK[way]}
        await boot_when_there_is_room(provider)
        await modest.signal(15)
        print(await modest.wait(), (await first.usage()).limit_kills)
        await first.kill()
        await boot_when_there_is_room(provider)
asyncio.run(main())
"""
    most = (open_files() + 12_000) * 4 // 3
    output = run_on_small_host(tmp_path, script, {"fs/file-max": most})
    text = f"files are open on this host, and new sandboxes need it to be below {most * 3 // 4}"
    assert output.splitlines() == [text, "143 0"]


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
