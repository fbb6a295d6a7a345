"""SIGKILL of the launcher, of its owner, of a sandbox's first process and of a launcher under load: nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.errors import LauncherGone, SandboxError, SandboxGone
from headrace.sandboxes.host.leftovers import run_label, sandboxes_left
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.pool.pool import Pool, PoolConfig
from support import process_handles as processes

pytestmark = pytest.mark.namespaces


def configured(run: Path) -> LocalSandboxConfig:
    return LocalSandboxConfig(label=run_label(run))


DAEMONS = """
setsid bash -c 'setsid sleep 1000 & sleep 1001' > /dev/null 2>&1 &
until [ $(pgrep -c sleep) = 2 ]; do :; done
"""


async def busy_sandbox(provider: LocalProvider) -> Sandbox:
    """Boot a sandbox with a daemon that left its command, its session and its output."""
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await sandbox.exec(DAEMONS, timeout_s=30)
    return sandbox


def family(root: int) -> set[int]:
    """Return `root` and its current descendants."""
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def mount_namespace(process: str) -> Path | None:
    try:
        return Path(f"/proc/{process}/ns/mnt").readlink()
    except OSError:
        return None


def namespaces_of(pids: set[int]) -> set[Path | None]:
    """Return the mount namespaces other than our own; each lives, with its mounts, as long as a process is in it."""
    return {mount_namespace(str(pid)) for pid in pids} - {mount_namespace("self"), None}


def inhabitants(spaces: set[Path | None]) -> set[int]:
    processes = {entry.name for entry in Path("/proc").glob("[0-9]*")}
    return {int(process) for process in processes if mount_namespace(process) in spaces}


async def test_killing_the_launcher_terminates_all_sandboxes_and_a_new_launcher_starts(tmp_path: Path) -> None:
    async with LocalProvider(configured(tmp_path)) as provider:
        sandboxes = [await busy_sandbox(provider) for _ in range(3)]
        running = asyncio.create_task(sandboxes[0].exec("touch /tmp/up; sleep 1000", timeout_s=600))
        await sandboxes[0].exec("until test -e /tmp/up; do :; done", timeout_s=30)
        launcher = provider.launcher_pid
        assert launcher is not None
        pids = family(launcher)
        assert len(pids) >= 10
        assert sandboxes_left(tmp_path) == 4
        spaces = namespaces_of(pids)
        assert len(spaces) == 4
        handles = processes.opened(pids | inhabitants(spaces))
        os.kill(launcher, signal.SIGKILL)
        await processes.all_dead(handles)
        assert sandboxes_left(tmp_path) == 0
        with pytest.raises(SandboxGone):
            await running
        for sandbox in sandboxes:
            with pytest.raises(SandboxGone):
                await sandbox.exec("true", timeout_s=30)
            await sandbox.kill()
        await create_again(provider)


async def test_a_hung_sandbox_launcher_is_killed_and_replaced(tmp_path: Path) -> None:
    config = LocalSandboxConfig(label=run_label(tmp_path), answer_timeout_s=5, boot_timeout_s=5)
    async with LocalProvider(config) as provider:
        sandbox = await busy_sandbox(provider)
        launcher = provider.launcher_pid
        assert launcher is not None
        os.kill(launcher, signal.SIGSTOP)
        with pytest.raises(LauncherGone, match="hung"):
            await provider.create(SandboxSpec())
        with pytest.raises(SandboxGone):
            await sandbox.exec("true", timeout_s=30)
        await create_again(provider)
    await asyncio.to_thread(wait_until_none_left, tmp_path)


async def test_a_launcher_is_started_again_after_a_failed_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalProvider(configured(tmp_path)) as provider:
        launcher = provider.launcher_pid
        assert launcher is not None
        with monkeypatch.context() as patch:
            # No program of this name can be started, which has the same effect as a full process table.
            patch.setattr(sys, "executable", str(tmp_path / "nothing"))
            os.kill(launcher, signal.SIGKILL)
            with pytest.raises(LauncherGone, match="could not be started"):
                await until_it_was_noticed(provider)
        assert await provider.list() == []
        await create_again(provider)


async def test_slots_of_a_dead_launcher_are_freed_for_a_waiting_lease(tmp_path: Path) -> None:
    config = PoolConfig(max_live=3, evaluation_reserve=1, reconcile_every_s=0.1)
    provider = LocalProvider(configured(tmp_path))
    await provider.start()
    async with asyncio.timeout(60), Pool({"local": provider}, config) as pool:
        assert len(await pool.lease([SandboxSpec(), SandboxSpec()])) == 2
        assert provider.launcher_pid is not None
        os.kill(provider.launcher_pid, signal.SIGKILL)
        (ref,) = await pool.lease([SandboxSpec()])
        assert not isinstance(ref, SandboxError)
        assert (await pool.status()).lost_total == 2


async def until_it_was_noticed(provider: LocalProvider) -> None:
    """Send requests until one fails for another reason than the death of the old launcher."""
    while provider.launcher_pid is not None:
        try:
            await provider.list()
        except LauncherGone:
            await asyncio.sleep(0.05)
    await provider.list()


async def create_again(provider: LocalProvider) -> None:
    """Create a sandbox with the new launcher; a create that still meets the dead one fails with a transient error."""
    async with asyncio.timeout(30):
        while True:
            try:
                sandbox = await provider.attach(await provider.create(SandboxSpec()))
            except LauncherGone as error:
                assert error.transient
                # The kernel reports the death with a delay.
                await asyncio.sleep(0.05)
                continue
            assert (await sandbox.exec("echo back", timeout_s=30)).stdout == b"back\n"
            return


OWNER = """
import asyncio, json, sys
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
async def main():
    async with LocalProvider(LocalSandboxConfig(label=sys.argv[1])) as provider:
        for _ in range(3):
            sandbox = await provider.attach(await provider.create(SandboxSpec()))
            await sandbox.exec(sys.argv[2], timeout_s=30)
        await (await provider.attach(await provider.create(SandboxSpec()))).freeze()
        print(json.dumps([provider.launcher_pid, provider.endpoint]), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_killing_the_owner_terminates_its_launcher_and_sandboxes(tmp_path: Path, number: signal.Signals) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, run_label(tmp_path), DAEMONS, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    async with asyncio.timeout(60):
        launcher, endpoint = json.loads(await owner.stdout.readline())
    pids = family(launcher)
    assert len(pids) >= 10
    spaces = namespaces_of(pids)
    assert len(spaces) == 4
    handles = processes.opened(pids | inhabitants(spaces))
    owner.send_signal(number)
    await owner.wait()
    await processes.all_dead(handles)
    assert sandboxes_left(tmp_path) == 0
    # Only the socket's folder may be left, which the next start removes.
    async with LocalProvider():
        assert not socket_folder_exists(endpoint)


def socket_folder_exists(endpoint: str) -> bool:
    return Path(endpoint).parent.exists()


async def test_killing_the_first_process_terminates_only_its_sandbox(tmp_path: Path) -> None:
    async with LocalProvider(configured(tmp_path)) as provider:
        victim = await busy_sandbox(provider)
        launcher = provider.launcher_pid
        assert launcher is not None
        # Looked up before a second sandbox exists, because pids wrap around.
        [first] = [pid for pid in family(launcher) - {launcher} if parent_of(pid) == launcher]
        other = await busy_sandbox(provider)
        running = asyncio.create_task(victim.exec("touch /tmp/up; sleep 1000", timeout_s=600))
        await victim.exec("until test -e /tmp/up; do :; done", timeout_s=30)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SandboxGone):
            await running
        assert [info.id for info in await provider.list()] == [other.id]
        assert (await other.exec("echo alive", timeout_s=30)).stdout == b"alive\n"


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


async def test_killing_the_launcher_during_boots_leaves_nothing_behind(tmp_path: Path) -> None:
    """F20."""
    async with LocalProvider(configured(tmp_path)) as provider:
        await provider.list()
        boots = [asyncio.create_task(provider.create(SandboxSpec())) for _ in range(60)]
        await asyncio.wait(boots, return_when=asyncio.FIRST_COMPLETED)
        launcher = provider.launcher_pid
        assert launcher is not None
        os.kill(launcher, signal.SIGKILL)
        results = await asyncio.gather(*boots, return_exceptions=True)
        # Requests that were finished or reached the next launcher succeed; all others fail with a transient error.
        failures = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(failure, SandboxError) and failure.transient for failure in failures)
    await asyncio.to_thread(wait_until_none_left, tmp_path)


def wait_until_none_left(run: Path) -> None:
    """Wait for half-built sandboxes, which die by their parent-death signal or the end of their control socket."""
    while sandboxes_left(run) > 0:
        os.sched_yield()


async def test_a_vanished_client_does_not_disturb_others(tmp_path: Path) -> None:
    async with LocalProvider(configured(tmp_path)) as provider:
        sandbox = await busy_sandbox(provider)
        for _ in range(5):
            stranger = LocalProvider()
            other = await stranger.attach(await provider.create(SandboxSpec(ttl_s=0.5)))
            command = asyncio.create_task(other.exec("sleep 1000", timeout_s=600))
            await asyncio.sleep(0)
            await stranger.aclose()
            with suppress(SandboxError):
                await command
        assert (await sandbox.exec("echo alive", timeout_s=30)).stdout == b"alive\n"
