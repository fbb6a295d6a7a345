"""Control groups of local sandboxes: limits, usage, pause and resume, and clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from headrace.sandboxes import doctor
from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.errors import CapacityExceeded, ExecTimeout, NamespacesUnavailable, SandboxGone, SpecRefused
from headrace.sandboxes.linux import cgroups, host_limits
from headrace.sandboxes.linux.cgroup_placement import LEAF
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces


@pytest.fixture(scope="module", autouse=True)
def _groups() -> None:
    try:
        doctor.require_namespaces()
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    missing = [row for row in doctor.probe() if row.name.startswith("cgroup") and not row.present]
    if missing:
        pytest.skip(f"{missing[0].name}: {missing[0].detail}")


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    async with LocalProvider() as provider:
        yield provider


def group_folders(launcher_pid: int, pattern: str = "headrace-*-{}-*/*/") -> list[Path]:
    mounts = cgroups.find_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    own = [Path(mount.folder) for mount in mounts]
    # In a container the launcher has moved this process, too, and its groups are beside the leaf.
    around = [folder.parent if folder.name == LEAF else folder for folder in own]
    return [folder for place in around for folder in place.glob(pattern.format(launcher_pid))]


async def test_only_the_command_that_exceeds_the_memory_limit_is_killed(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=64 << 20)))
    bystander = await sandbox.spawn("sleep 1000")
    hog = await sandbox.exec("python3 -c 'b = bytearray(1 << 30); print(len(b))'", timeout_s=30)
    assert hog.exit_code == 128 + signal.SIGKILL
    usage = await sandbox.usage()
    assert usage.oom_kills == 1
    assert usage.memory_limit_bytes == 64 << 20
    assert 0 < usage.memory_bytes < 64 << 20
    await bystander.signal(signal.SIGTERM)
    assert await bystander.wait() == 128 + signal.SIGTERM


async def test_files_count_as_memory_and_the_sandbox_survives_exceeding_the_limit(provider: LocalProvider) -> None:
    """An agent cannot avoid a reward of zero by filling the memory with objects that belong to no process."""
    sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=64 << 20)))
    # System V segments (0o1000 creates one) are never removed and outlive a killed writer.
    segments = (
        "import ctypes; c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(200): ctypes.memset(c.shmat(c.shmget(0, 1 << 20, 0o1600), None, 0), 1, 1 << 20)"
    )
    await sandbox.exec("python3 -", stdin=segments.encode(), timeout_s=60)
    filled = await sandbox.exec("head -c 200M /dev/zero > /tmp/file", timeout_s=60)
    assert b"No space left" in filled.stderr
    hog = await sandbox.exec("python3 -c 'b = bytearray(1 << 30); print(len(b))'", timeout_s=30)
    assert hog.exit_code == 128 + signal.SIGKILL
    assert (await sandbox.exec("rm /tmp/file; echo fine", timeout_s=30)).stdout == b"fine\n"


async def test_disk_that_is_asked_for_comes_on_top_of_memory(provider: LocalProvider) -> None:
    """As Harbor's `storage_mb` and `memory_mb` do."""
    spec = SandboxSpec(memory_bytes=64 << 20, disk_bytes=160 << 20)
    sandbox = await provider.attach(await provider.create(spec))
    filled = await sandbox.exec(
        "head -c 150M /dev/zero > /tmp/file && python3 -c 'b = bytearray(40 << 20)'", timeout_s=60
    )
    assert filled.exit_code == 0, filled
    assert b"No space left" in (await sandbox.exec("head -c 20M /dev/zero > /tmp/more", timeout_s=60)).stderr
    with pytest.raises(SpecRefused, match="memory_bytes with disk_bytes, which are stored in memory"):
        await provider.create(SandboxSpec(memory_bytes=64 << 20, disk_bytes=1 << 42))


HOARD = """
use Fcntl; use Socket;
open(my $score, ">", "/proc/self/oom_score_adj"); print $score "0"; close $score;
for (1 .. 1500) {
  socketpair(my $ours, my $theirs, AF_UNIX, SOCK_STREAM, 0) or last;
  fcntl($ours, F_SETFL, O_NONBLOCK);
  1 while syswrite($ours, "x" x 65536);
  push @kept, $ours, $theirs;
}
"""


@pytest.mark.timeout(400)
async def test_a_small_process_that_exhausts_kernel_memory_does_not_kill_the_sandbox(provider: LocalProvider) -> None:
    """Data in sockets does not make a process large, so that the kernel would kill the sandbox's first process."""
    sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=64 << 20)))
    hoard = await sandbox.exec("perl -", stdin=HOARD.encode(), user="agent", timeout_s=300)
    assert hoard.exit_code == 128 + signal.SIGKILL
    assert (await sandbox.exec("echo fine", timeout_s=30)).stdout == b"fine\n"
    assert (await sandbox.usage()).oom_kills >= 1


CONTROLLERS = Path("/sys/fs/cgroup/cgroup.controllers")
MEMORY_IS_VERSION_2 = CONTROLLERS.exists() and "memory" in CONTROLLERS.read_text().split()
QUEUE = """
import socket
kept = []
for _ in range(900):
    reader, writer = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    reader.bind(("127.0.0.1", 0))
    writer.setblocking(False)
    for _ in range(60):
        writer.sendto(bytes(8000), reader.getsockname())
    kept.append(reader)
rows = open("/proc/net/udp").read().splitlines()[1:]
print(sum(int(row.split()[4].partition(":")[2], 16) for row in rows))
"""


async def test_socket_buffer_memory_is_limited(provider: LocalProvider) -> None:
    """The memory for sockets is shared by the whole host. Version 1 drops datagrams above the limit; version 2 counts
    them as memory of the group, and kills the process."""
    sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=64 << 20)))
    result = await sandbox.exec("python3 -", stdin=QUEUE.encode(), user="agent", timeout_s=60)
    if MEMORY_IS_VERSION_2:
        assert result.exit_code == 128 + signal.SIGKILL, result
        assert (await sandbox.usage()).oom_kills >= 1
        assert (await sandbox.exec("echo fine", timeout_s=30)).stdout == b"fine\n"
    else:
        assert result.exit_code == 0, result
        assert 0 < int(result.stdout) < 80 << 20


async def test_processor_time_is_limited(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(cpu=0.1)))
    busy = await sandbox.spawn("while :; do :; done")
    await sandbox.exec("timeout 1 tail -f /dev/null", timeout_s=30)
    before, started_s = (await sandbox.usage()).cpu_s, time.monotonic()
    await sandbox.exec("timeout 1 tail -f /dev/null", timeout_s=30)
    after = await sandbox.usage()
    used_s = after.cpu_s - before
    assert (after.cpu_waited_s or 0.0) > used_s, "throttled for nine tenths of the time"
    # A tenth of a processor, and the budget of one period.
    assert used_s < 0.3 * (time.monotonic() - started_s) + 0.1
    await busy.signal(signal.SIGKILL)


SET_BACK = """
import os
os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
for _ in range(30):
    if os.fork() == 0:
        os.write(1, b".")
        while True:
            pass
"""


async def test_a_sandbox_whose_first_process_gets_no_processor_time_can_be_killed(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(cpu=0.1)))
    busy = await sandbox.spawn(["python3", "-c", SET_BACK])
    seen = 0
    async for piece in busy.output():
        seen += len(piece.data)
        if seen == 30:
            break
    async with asyncio.timeout(30):
        await sandbox.kill()
    assert await provider.list() == []


async def test_the_number_of_processes_is_limited_and_reported(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(pids=16)))
    forks = "import os\nfor _ in range(100):\n if os.fork() == 0: os.execlp('sleep', 'sleep', '1000')"
    result = await sandbox.exec("python3 -", stdin=forks.encode(), timeout_s=30)
    assert b"BlockingIOError" in result.stderr
    assert 10 < (await sandbox.usage()).processes <= 16 + 33


async def test_usage_of_a_frozen_sandbox_raises_sandbox_gone(sandbox: Sandbox) -> None:
    await sandbox.freeze()
    with pytest.raises(SandboxGone):
        await sandbox.usage()


async def test_processes_of_a_paused_sandbox_are_stopped(sandbox: Sandbox, provider: LocalProvider) -> None:
    counter = await sandbox.spawn("while :; do echo tick; done", stdin=False)
    output = counter.output()
    await anext(output)
    await sandbox.pause()
    await sandbox.pause()
    [info] = await provider.list()
    assert info.state == "paused"
    before = await sandbox.usage()
    waiting = asyncio.ensure_future(sandbox.exec("echo later", timeout_s=30))
    assert not (await asyncio.wait((waiting,), timeout=0.3))[0]
    # Usage that was counted late may be added; a running loop would have used the whole time.
    assert (await sandbox.usage()).cpu_s - before.cpu_s < 0.1
    await sandbox.resume()
    await sandbox.resume()
    assert (await waiting).stdout == b"later\n"
    await counter.signal(signal.SIGKILL)


async def test_a_pause_extends_command_deadlines(sandbox: Sandbox) -> None:
    """The pause is longer than the command's timeout, most of which is left after it."""
    command = "echo > /tmp/started; until test -e /tmp/go; do sleep 0.1; done; echo end"
    running = asyncio.ensure_future(sandbox.exec(command, timeout_s=5))
    while (await sandbox.exec("test -e /tmp/started", timeout_s=30)).exit_code != 0:
        pass
    await sandbox.pause()
    assert not (await asyncio.wait((running,), timeout=5.5))[0]
    await sandbox.resume()
    await sandbox.exec("echo > /tmp/go", timeout_s=30)
    assert (await running).stdout == b"end\n"
    with pytest.raises(ExecTimeout):
        await sandbox.exec("sleep 1000", timeout_s=0.3)


async def test_a_pause_at_any_moment_extends_command_deadlines(sandbox: Sandbox) -> None:
    """The first process of a busy sandbox may be stopped between two readings of the clock."""
    for _ in range(4):
        running = asyncio.ensure_future(sandbox.exec("sleep 0.05; echo end", timeout_s=4))
        busy = [asyncio.ensure_future(sandbox.exec("true", timeout_s=30)) for _ in range(6)]
        await sandbox.exec("true", timeout_s=30)
        await sandbox.pause()
        await asyncio.wait((running,), timeout=4.2)
        await sandbox.resume()
        assert (await running).stdout == b"end\n"
        await asyncio.gather(*busy)


async def test_a_paused_sandbox_can_be_killed_and_its_lease_still_runs(provider: LocalProvider) -> None:
    for ttl_s in (300.0, 1.0):
        sandbox = await provider.attach(await provider.create(SandboxSpec(ttl_s=300.0)))
        await sandbox.pause()
        await sandbox.renew(ttl_s)
        running = asyncio.ensure_future(sandbox.exec("true", timeout_s=30))
        if ttl_s > 1.0:
            await sandbox.kill()
        with pytest.raises(SandboxGone):
            await running
    assert await provider.list() == []


async def test_launchers_on_one_host_use_different_user_ids() -> None:
    """The kernel counts processes by user id, so that one launcher's processes would be charged to another's
    sandbox."""
    forks = "import os\nfor _ in range(40):\n if os.fork() == 0: os.execlp('sleep', 'sleep', '1000')\nprint('all')"
    async with LocalProvider() as one, LocalProvider() as other:
        sandboxes = [
            await provider.attach(await provider.create(SandboxSpec(pids=50)))
            for provider in (one, other)
            for _ in range(2)
        ]
        maps = [(await sandbox.exec("cat /proc/self/uid_map", timeout_s=30)).stdout for sandbox in sandboxes]
        assert len(set(maps)) == 4
        for sandbox in sandboxes:
            assert (await sandbox.exec("python3 -", stdin=forks.encode(), timeout_s=30)).stdout == b"all\n"


async def test_an_invalid_limit_is_refused(provider: LocalProvider) -> None:
    for spec in (SandboxSpec(memory_bytes=1), SandboxSpec(cpu=-1.0), SandboxSpec(pids=0), SandboxSpec(ttl_s=-1.0)):
        with pytest.raises(SpecRefused):
            await provider.create(spec)


async def test_limits_above_the_hosts_total_are_refused_with_the_ceiling(provider: LocalProvider) -> None:
    for spec, name in ((SandboxSpec(memory_bytes=1 << 45), "memory_bytes"), (SandboxSpec(pids=10**9), "pids")):
        with pytest.raises(SpecRefused, match=rf"{name}=\d+ is above the ceiling \d+") as refused:
            await provider.create(spec)
        assert not refused.value.transient
    # More processors than exist are no limit: recipes are moved from large machines to small ones.
    await (await provider.attach(await provider.create(SandboxSpec(cpu=1e12)))).kill()


async def test_all_sandboxes_together_stay_below_the_hosts_resources(provider: LocalProvider) -> None:
    host = host_limits.read_host()
    found = {
        name: int((folder / name).read_text())
        for folder in group_folders(provider.launcher_pid or 0, "headrace-*-{}-*/")
        for name in ("memory.limit_in_bytes", "memory.max", "pids.max")
        if (folder / name).exists() and (folder / name).read_text().strip() != "max"
    }
    memory_bytes = min(
        found.get("memory.max", host.memory_bytes), found.get("memory.limit_in_bytes", host.memory_bytes)
    )
    assert memory_bytes < host.memory_bytes * 0.9
    assert found["pids.max"] < host.processes


async def test_a_command_gets_the_descriptors_and_processes_that_programs_need(sandbox: Sandbox) -> None:
    told = await sandbox.exec("ulimit -n; ulimit -u", timeout_s=30)
    assert told.stdout.split() == [b"4096", b"512"]


async def test_at_most_max_live_sandboxes_run_at_once() -> None:
    async with LocalProvider(LocalSandboxConfig(max_live=1)) as provider:
        first = await provider.attach(await provider.create(SandboxSpec()))
        with pytest.raises(CapacityExceeded, match="max_live"):
            await provider.create(SandboxSpec())
        await first.freeze()
        await provider.create(SandboxSpec())


async def test_control_groups_are_removed_with_their_sandbox_and_launcher() -> None:
    async with LocalProvider() as provider:
        assert provider.launcher_pid is not None
        kept = await provider.attach(await provider.create(SandboxSpec()))
        other = await provider.attach(await provider.create(SandboxSpec()))
        assert {folder.name for folder in group_folders(provider.launcher_pid)} == {kept.id, other.id}
        await other.kill()
        assert {folder.name for folder in group_folders(provider.launcher_pid)} == {kept.id}
    assert group_folders(provider.launcher_pid) == []


async def test_groups_of_a_killed_launcher_are_removed_by_the_next_one() -> None:
    async with LocalProvider() as provider:
        await provider.create(SandboxSpec())
        dead = provider.launcher_pid
        assert dead is not None
        inhabitants = psutil.Process(dead).children(recursive=True)
        os.kill(dead, signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, inhabitants, timeout=60)
        async with LocalProvider():
            assert await asyncio.to_thread(group_folders, dead) == []


async def test_boots_succeed_after_the_launchers_groups_were_removed() -> None:
    async with LocalProvider(LocalSandboxConfig()) as provider:
        assert provider.launcher_pid is not None
        for folder in group_folders(provider.launcher_pid, "headrace-*-{}-*/"):
            folder.rmdir()
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        assert (await sandbox.usage()).processes >= 1
