"""Runs in containers of one machine: /tmp is shared, or separate, and pids of one container mean nothing in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.pools.config import SandboxSection
from headrace.actors.runtime.pools.providers import start_provider
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.host.leftovers import run_label
from headrace.sandboxes.images.folders import Owner, is_alive, new_owner
from headrace.sandboxes.linux import cgroups
from headrace.sandboxes.linux.id_blocks import BLOCKS, FIRST_ID, IDS_PER_SANDBOX, RANGES_PER_BLOCK, IdBlocks
from headrace.sandboxes.linux.stdlib_process import stdlib_command
from headrace.sandboxes.local.launcher_process import ProviderFolder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace of its own needs root")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a /tmp for this test alone, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def in_another_container(code: str, *arguments: str) -> str:
    """Run Python where none of our processes is visible, and return its output."""
    command = ("unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout


def test_the_run_label_depends_on_path_and_run_id(tmp_path: Path) -> None:
    labels = [run_label(tmp_path)]
    for identity in ("one", "two"):
        RunDirectory(path=tmp_path).identity.write_text(identity)
        labels.append(run_label(tmp_path))
    (tmp_path / "copy").mkdir()
    RunDirectory(path=tmp_path / "copy").identity.write_text("two")
    assert len({*labels, run_label(tmp_path / "copy")}) == 4


async def test_runs_with_the_same_path_do_not_touch_each_others_sandboxes(shared: Path, tmp_path: Path) -> None:
    section, directory = SandboxSection(), RunDirectory(path=tmp_path / "run")
    directory.path.mkdir()
    directory.identity.write_text("first")
    first = await start_provider(section, directory)
    try:
        async with SandboxPool(section, directory=directory, provider=first) as pool:
            [ref] = await pool.lease([SandboxSpec(idempotency_key="key")])
            sandbox = await first.attach(ref)
            # The other container has its own files at that path.
            directory.path.rename(tmp_path / "elsewhere")
            directory.path.mkdir()
            directory.identity.write_text("second")
            async with SandboxPool(section, directory=directory) as other:
                [theirs] = await other.lease([SandboxSpec(idempotency_key="key")])
                assert theirs.endpoint != ref.endpoint
            assert (await sandbox.exec("echo here", timeout_s=30)).stdout == b"here\n"
            assert [info.id for info in await first.list()] == [ref.id]
    finally:
        await first.aclose()


@as_root
def test_the_folder_of_a_launcher_starting_in_another_container_is_not_removed(shared: Path) -> None:
    code = """
import sys
from pathlib import Path
from headrace.sandboxes.local.launcher_process import ProviderFolder
print(ProviderFolder(Path(sys.argv[1])).path)
"""
    mine = ProviderFolder(shared / "sandboxes")
    left = Path(in_another_container(code, str(shared / "sandboxes")).strip())
    assert mine.path.is_dir()
    assert left.is_dir()
    mine.remove()
    other = ProviderFolder(shared / "sandboxes")
    assert {path.name for path in (shared / "sandboxes").iterdir()} == {other.path.name}
    other.remove()


def test_a_folder_that_only_resembles_ours_is_not_removed(shared: Path) -> None:
    (shared / "sandboxes" / "2024-backup").mkdir(parents=True, mode=0o700)
    (shared / "sandboxes").chmod(0o700)
    ProviderFolder(shared / "sandboxes").remove()
    assert (shared / "sandboxes" / "2024-backup").is_dir()


@as_root
def test_an_owner_in_another_container_counts_as_alive_until_the_next_boot() -> None:
    owner = in_another_container("from headrace.sandboxes.images.folders import new_owner; print(new_owner())").strip()
    assert is_alive(Owner(owner))
    assert is_alive(new_owner())
    pid, _, rest = owner.partition("-")
    assert not is_alive(Owner(f"{pid}-00000000{rest[8:]}"))


def test_a_name_that_is_no_owners_is_not_alive() -> None:
    pid = new_owner().partition("-")[0]
    assert not any(is_alive(Owner(name)) for name in ("", "7", "x-y", f"{pid}-", f"{pid}--", f"{pid}-a_b-0"))


def test_containers_start_at_different_id_blocks_and_can_use_all_of_them(tmp_path: Path) -> None:
    claimed = {}
    for name, start in (("one", 4026531836), ("two", 4026532448)):
        (tmp_path / name).mkdir()
        folder = os.open(tmp_path / name, os.O_RDONLY | os.O_DIRECTORY)
        blocks = IdBlocks(folder, start)
        claimed[name] = [blocks.claim() for _ in range(BLOCKS)]
        with pytest.raises(IndexError):
            blocks.claim()
        os.close(folder)
    step = RANGES_PER_BLOCK * IDS_PER_SANDBOX
    assert sorted(claimed["one"]) == sorted(claimed["two"]) == [FIRST_ID + step * number for number in range(BLOCKS)]
    assert claimed["one"][0] == FIRST_ID + step * (4026531836 % BLOCKS)
    assert claimed["one"][0] != claimed["two"][0]


@as_root
async def test_a_launcher_claims_the_block_of_its_pid_namespace(shared: Path) -> None:
    async with LocalProvider() as provider:
        await provider.create(SandboxSpec())
        [block] = (shared / "headrace-ids-0").iterdir()
        assert int(block.name) == os.stat("/proc/self/ns/pid").st_ino % BLOCKS  # noqa: PTH116


def own_groups(launcher_pid: int) -> list[Path]:
    mounts = cgroups.find_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    return [folder for mount in mounts for folder in Path(mount.folder).glob(f"headrace-*-{launcher_pid}-*")]


def wait_until_made(launcher: subprocess.Popen[bytes]) -> None:
    """Wait for the launcher's name in the process table, its last step before its answer."""
    deadline = time.monotonic() + 60
    while not Path(f"/proc/{launcher.pid}/cmdline").read_bytes().startswith(b"headrace-launcher"):
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_before_the_first_reply_leaves_no_control_group_behind(shared: Path) -> None:
    settings = LocalSandboxConfig(max_sandboxes=1, max_live=1).launcher_settings()
    settings |= {"owner_pid": 0, "admin_secret": "s", "tied": True}
    settings |= {"socket_path": str(shared / "socket"), "ids_folder": str(shared)}
    answers, stdout = os.pipe()
    # The pipe is full, so that it cannot answer before the pipe is read.
    os.set_blocking(stdout, False)
    filled = os.write(stdout, bytes(1 << 20))
    os.set_blocking(stdout, True)
    command = stdlib_command("launcher.main")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, cwd="/", env={}) as launcher:
        os.close(stdout)
        try:
            assert launcher.stdin is not None
            launcher.stdin.write(json.dumps(settings).encode() + b"\n")
            launcher.stdin.flush()
            wait_until_made(launcher)
            if os.geteuid() == 0 and not own_groups(launcher.pid):
                pytest.skip("this machine gives no control groups")
            launcher.send_signal(signal.SIGTERM)
            with os.fdopen(answers, "rb") as reading:
                text = reading.read()
            assert launcher.wait(60) == 0
        finally:
            launcher.kill()
    assert b"missing" in text[filled:]
    assert own_groups(launcher.pid) == []
