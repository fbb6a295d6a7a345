"""Failure of every step of a boot: the first process dies, the launcher dies, or the kernel refuses. Nothing is left.

A step is a call of a wrapper in `headrace.sandboxes.linux.syscalls`. The launcher runs as always, from a script that
counts these calls and makes the chosen one fail.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.sandboxes.base import SandboxInfo, SandboxSpec
from headrace.sandboxes.errors import BootFailed, LauncherGone, SandboxError
from headrace.sandboxes.host.leftovers import run_label, sandboxes_left
from headrace.sandboxes.linux import cgroups, stdlib_process
from headrace.sandboxes.local import launcher_process
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces

INJECTION_SCRIPT = """
import errno, mmap, os, signal
from headrace.sandboxes.linux import syscalls

plan, step = {plan!r}, {step!r}
launcher = os.getpid()
begun = False
with open({count_file!r}, "r+b") as file:
    # Shared by all processes of the launcher, and not a descriptor that a child closes.
    counter = mmap.mmap(file.fileno(), 0)

def failing(function):
    def call(*arguments, **options):
        global begun
        # From the first layer on, also where the sandbox's own root is all that can be seen.
        begun = begun or (os.path.exists("/layers") and bool(os.listdir("/layers")))
        if begun:
            seen = counter[:].rstrip(b"\\0") + function.__name__.encode() + b"\\n"
            counter[:len(seen)] = seen
            if seen.count(b"\\n") == step:
                if plan == "refuse":
                    raise OSError(errno.ENOMEM, "injected: " + function.__name__)
                if plan != "launcher":
                    # Process 1 is deaf to its own SIGKILL.
                    os._exit(1)
                os.kill(launcher, signal.SIGKILL)
                signal.pause()
        return function(*arguments, **options)
    return call

for name in ("mount", "copy_mount", "attach_mount", "map_mount_ids", "detach", "set_mount_flags", "pivot_into",
             "unshare", "join_namespace", "open_resolved", "keep_capabilities_as", "drop_capabilities",
             "forbid_new_privileges", "filter_calls", "die_with_parent"):
    setattr(syscalls, name, failing(getattr(syscalls, name)))
"""


class FaultInjector:
    """Controls at which step new launchers fail, and reads the steps they counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self._count_file = folder / "steps"

    def inject(self, plan: str, step: int) -> None:
        """Let launchers started from now on fail at this step; step 0 means at none."""
        self._count_file.write_bytes(bytes(1 << 14))
        script = INJECTION_SCRIPT.format(plan=plan, step=step, count_file=str(self._count_file))
        load = 'importlib.import_module("headrace.sandboxes." + sys.argv[2]).main()'
        bootstrap = stdlib_process._BOOTSTRAP.replace(load, f"{script}\n{load}")
        assert script in bootstrap
        folder = str(Path(stdlib_process.__file__).parents[1])
        command = (sys.executable, "-I", "-S", "-c", bootstrap, folder)
        self._monkeypatch.setattr(launcher_process, "stdlib_command", lambda module: (*command, module))

    def steps(self) -> list[str]:
        return self._count_file.read_bytes().rstrip(b"\0").decode().split()


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultInjector]:
    yield FaultInjector(monkeypatch, tmp_path)


def groups_of(launcher: int | None) -> list[Path]:
    mounts = cgroups.find_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    return [folder for mount in mounts for folder in Path(mount.folder).glob(f"headrace-*-{launcher}-*/*/")]


def layers_of(launcher: int | None) -> list[str]:
    """Return the mounts below /layers in the launcher's own mount namespace."""
    text = Path(f"/proc/{launcher}/mounts").read_text()
    return [line for line in text.splitlines() if line.split()[1].startswith("/layers/")]


async def boot_and_kill(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=256 << 20)))
    assert (await sandbox.exec("echo fine", timeout_s=30)).stdout == b"fine\n"
    await sandbox.kill()


async def count_steps(injector: FaultInjector, config: LocalSandboxConfig) -> int:
    """Return the number of steps of one boot, one command and one kill."""
    injector.inject("none", 0)
    async with LocalProvider(config) as provider:
        await boot_and_kill(provider)
    return len(injector.steps())


@pytest.mark.parametrize("plan", ["first process", "refuse"])
async def test_an_interrupted_boot_leaves_nothing_behind_and_the_next_one_works(
    injector: FaultInjector, tmp_path: Path, plan: str
) -> None:
    config = LocalSandboxConfig(label=run_label(tmp_path))
    steps = await count_steps(injector, config)
    assert steps > 15
    failures = 0
    for step in range(1, steps + 1):
        injector.inject(plan, step)
        async with LocalProvider(config) as provider:
            try:
                await boot_and_kill(provider)
            except SandboxError as error:
                assert isinstance(error, BootFailed | LauncherGone), (step, error)
                failures += 1
            assert await listed(provider) == []
            if provider.launcher_pid is not None:
                assert groups_of(provider.launcher_pid) == [], (step, injector.steps())
                assert await asyncio.to_thread(layers_of, provider.launcher_pid) == [], (step, injector.steps())
        assert sandboxes_left(tmp_path) == 0
    # The steps of a kill do not affect the boot.
    assert failures > 10


async def test_the_remains_of_a_launcher_killed_during_a_boot_are_removed_at_the_next_start(
    injector: FaultInjector, tmp_path: Path
) -> None:
    config = LocalSandboxConfig(label=run_label(tmp_path))
    steps = await count_steps(injector, config)
    died = 0
    for step in range(1, steps + 1, 2):
        injector.inject("launcher", step)
        async with LocalProvider(config) as provider:
            first = provider.launcher_pid
            try:
                await boot_and_kill(provider)
            except SandboxError as error:
                assert error.transient or "died" in str(error), (step, error)
                died += 1
            injector.inject("none", 0)
            await boot_again(provider)
            if provider.launcher_pid != first:
                assert groups_of(first) == []
        assert sandboxes_left(tmp_path) == 0
    assert died > 5


async def listed(provider: LocalProvider) -> list[SandboxInfo]:
    """List the sandboxes; if the launcher itself died, another one is started."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await provider.list()
            except LauncherGone:
                await asyncio.sleep(0.02)


async def boot_again(provider: LocalProvider) -> None:
    """Boot again, once the kernel has reported the death of the launcher."""
    async with asyncio.timeout(30):
        while True:
            try:
                await boot_and_kill(provider)
            except SandboxError:
                await asyncio.sleep(0.02)
            else:
                return


def test_every_syscall_wrapper_of_a_boot_is_covered() -> None:
    """A new wrapper that a boot calls must be made to fail too."""
    from headrace.sandboxes.linux import syscalls

    known = set(INJECTION_SCRIPT.split("for name in (")[1].split("):")[0].replace('"', "").replace(",", " ").split())
    boring = {"become_subreaper", "forbid_inspection", "name_process", "create_files_as"}
    boring |= {"allow_inspection", "duplicate_of", "enter_own_user_namespace", "reason_of"}
    own = {name for name, value in vars(syscalls).items() if getattr(value, "__module__", "") == syscalls.__name__}
    functions = {name for name in own if not name.startswith("_") and callable(getattr(syscalls, name))}
    assert functions == known | boring, os.linesep.join(sorted(functions ^ (known | boring)))
