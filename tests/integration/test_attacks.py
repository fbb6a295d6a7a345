"""Attacks on the host and on the evaluation, each contained; where it is harmless, the same attack succeeds with its
defence switched off. docs/attacks.md lists all, with those that have their test elsewhere."""

from __future__ import annotations

import ast
import asyncio
import re
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.base import ExecResult, Sandbox, SandboxSpec
from headrace.sandboxes.errors import SandboxFileError
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(memory_bytes=None)) as provider:
        yield provider


async def boot(provider: LocalProvider, **spec: Any) -> Sandbox:
    return await provider.attach(await provider.create(SandboxSpec(**spec)))


async def python(sandbox: Sandbox, source: str, *, user: str = "agent") -> ExecResult:
    return await sandbox.exec("python3 -", stdin=source.encode(), user=user, timeout_s=60)


FORKS = """
import os, signal
for count in range(200):
    if os.fork() == 0:
        signal.pause()
print("all")
"""


@pytest.mark.core
@pytest.mark.parametrize(("pids", "succeeds"), [(64, False), (400, True)])
async def test_a_fork_bomb_cannot_exceed_the_process_limit(
    provider: LocalProvider, pids: int, *, succeeds: bool
) -> None:
    sandbox = await boot(provider, pids=pids)
    result = await python(sandbox, FORKS)
    assert (result.stdout == b"all\n") is succeeds
    assert (await sandbox.usage()).processes <= pids + 33
    assert (await sandbox.exec("echo fine", timeout_s=30)).stdout == b"fine\n"


@pytest.mark.parametrize(("memory_bytes", "succeeds"), [(64 << 20, False), (None, True)])
async def test_memory_use_above_the_limit_fails_and_the_sandbox_survives(
    provider: LocalProvider, memory_bytes: int | None, *, succeeds: bool
) -> None:
    sandbox = await boot(provider, memory_bytes=memory_bytes)
    result = await python(sandbox, "print(len(b'x' * (160 << 20)))")
    assert (result.exit_code == 0) is succeeds
    assert (await sandbox.exec("echo fine", timeout_s=30)).stdout == b"fine\n"


@pytest.mark.parametrize(("disk_bytes", "succeeds"), [(16 << 20, False), (64 << 20, True)])
async def test_writing_more_than_the_disk_limit_fails(
    provider: LocalProvider, disk_bytes: int, *, succeeds: bool
) -> None:
    sandbox = await boot(provider, disk_bytes=disk_bytes)
    result = await sandbox.exec("head -c 32M /dev/zero > /tmp/file", user="agent", timeout_s=60)
    assert (result.exit_code == 0) is succeeds
    assert (await sandbox.exec("rm /tmp/file && echo fine", timeout_s=30)).stdout == b"fine\n"


@pytest.mark.parametrize(("disk_bytes", "succeeds"), [(4 << 20, False), (64 << 20, True)])
async def test_creating_too_many_files_fails_at_the_disk_limit(
    provider: LocalProvider, disk_bytes: int, *, succeeds: bool
) -> None:
    sandbox = await boot(provider, disk_bytes=disk_bytes)
    result = await python(sandbox, "for n in range(3000): open(f'/tmp/{n}', 'w').close()\nprint('all')")
    assert (result.stdout == b"all\n") is succeeds
    assert (b"No space left" in result.stderr) is not succeeds


@pytest.mark.parametrize("size", ["1G", pytest.param("10G", marks=pytest.mark.slow)])
async def test_endless_output_is_cut_off(provider: LocalProvider, size: str) -> None:
    sandbox = await boot(provider)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.exec(f"head -c {size} /dev/zero", timeout_s=110, max_output_bytes=1 << 20)
    assert (result.exit_code, len(result.stdout), result.truncated) == (0, 1 << 20, True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


async def test_a_download_does_not_follow_a_link_to_the_host(provider: LocalProvider, tmp_path: Path) -> None:
    """From outside, through the sandbox's root, the link leads to the host's own file."""
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    sandbox = await boot(provider)
    await sandbox.exec(f"mkdir -p /workspace/out && ln -s {secret} /workspace/out/result", user="agent", timeout_s=30)
    with pytest.raises(SandboxFileError):
        await sandbox.read("/workspace/out/result", max_bytes=100)
    undefended = await asyncio.to_thread(read_from_outside, provider, "workspace/out/result")
    assert undefended == "of the host"


def read_from_outside(provider: LocalProvider, path: str) -> str:
    """What a careless transfer on the host would do."""
    [first] = Path(f"/proc/{provider.launcher_pid}/task/{provider.launcher_pid}/children").read_text().split()
    return (Path(f"/proc/{first}/root") / path).read_text()


SWAP = """
import os, sys
host = sys.argv[1]
os.makedirs("/workspace/real", exist_ok=True)
os.symlink(host, "/workspace/link")
print("ready", flush=True)
while True:
    for name in ("link", "real"):
        try:
            os.unlink("/workspace/next")
        except OSError:
            pass
        os.symlink(f"/workspace/{name}", "/workspace/next")
        os.rename("/workspace/next", "/workspace/swapped")
"""


@pytest.mark.core
async def test_a_folder_swapped_for_a_link_during_transfers_gives_no_access(
    provider: LocalProvider, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("of the host")
    sandbox = await boot(provider)
    await sandbox.write("/tmp/swap.py", SWAP.encode())
    swapping = await sandbox.spawn(["python3", "/tmp/swap.py", str(tmp_path)], user="agent")
    await anext(swapping.output())
    contents = set()
    for number in range(150):
        try:
            await sandbox.write("/workspace/swapped/file", f"{number}".encode(), user="agent")
            contents.add((await sandbox.read("/workspace/swapped/file", max_bytes=100))[:3])
        except SandboxFileError:
            continue
    assert b"of " not in contents
    assert [path.name for path in await asyncio.to_thread(lambda: list(tmp_path.iterdir()))] == ["file"]
    assert (tmp_path / "file").read_text() == "of the host"


async def test_a_hard_link_to_an_unreadable_file_gives_no_access(provider: LocalProvider) -> None:
    sandbox = await boot(provider)
    await sandbox.exec("echo secret > /etc/secret; chmod 600 /etc/secret", timeout_s=30)
    await sandbox.exec("ln /etc/secret /workspace/result", user="agent", timeout_s=30)
    with pytest.raises(SandboxFileError):
        await sandbox.read("/workspace/result", user="agent", max_bytes=100)


@pytest.mark.parametrize("path", ["/../../../etc/hostname", "/workspace/../../../../etc/hostname", "//etc/hostname"])
async def test_paths_with_dots_cannot_leave_the_sandbox_root(provider: LocalProvider, path: str) -> None:
    sandbox = await boot(provider)
    assert await sandbox.read(path, max_bytes=100) == b"sandbox\n"
    await sandbox.write(path, b"changed\n")
    assert (await sandbox.exec("cat /etc/hostname", timeout_s=30)).stdout == b"changed\n"


@pytest.mark.parametrize("path", ["relative", "", ".", "a/../b", "/nul\0byte"])
async def test_invalid_paths_are_refused(provider: LocalProvider, path: str) -> None:
    sandbox = await boot(provider)
    with pytest.raises(SandboxFileError):
        await sandbox.write(path, b"data")


async def test_the_clock_cannot_be_set(provider: LocalProvider) -> None:
    """The same moment again, so that nothing happens where the defence is missing."""
    sandbox = await boot(provider)
    setting = "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())"
    result = await python(sandbox, setting, user="root")
    assert b"Operation not permitted" in result.stderr
    adjusting = (
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nb = ctypes.create_string_buffer(256)\n"
        "b[0] = 2\nprint(c.adjtimex(b), os.strerror(ctypes.get_errno()))"
    )
    assert b"-1 Operation not permitted" in (await python(sandbox, adjusting, user="root")).stdout
    assert abs(time.time() - float((await python(sandbox, "import time\nprint(time.time())")).stdout)) < 60


@pytest.mark.core
def test_every_documented_attack_has_its_test() -> None:
    """docs/attacks.md names a test for each row; the test must exist under that name."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)::(\w+)`", (ROOT / "docs/attacks.md").read_text(), re.MULTILINE)
    assert len(rows) >= 25
    for attack, file, test in rows:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in functions, (attack, file, test)
