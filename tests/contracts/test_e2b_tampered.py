"""Programs for files that an agent has replaced: the client gets errors, and the server buffers nothing."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from support import image_kit as kit

pytestmark = pytest.mark.namespaces
FOR_EVER = "while printf '%65536s' 1; do :; done"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system with bash (also as `shell`), mv and a few tools."""
    root = tmp_path / "root"
    with tarfile.open(fileobj=io.BytesIO(kit.tar(kit.base_entries()))) as archive:
        archive.extractall(root, filter="fully_trusted")
    shutil.copy(root / "usr/bin/bash", root / "usr/bin/shell")
    libraries = subprocess.run(("ldd", "/bin/mv"), capture_output=True, text=True, check=True).stdout
    for path in ("/bin/mv", *re.findall(r"/\S+", libraries)):
        shutil.copy(path, root / path[1:])
    return root


@pytest.fixture
async def boot(tmp_path: Path, root: Path, wire: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """`await boot(program="script")` returns a client of a sandbox with these programs in its image."""
    config = LocalSandboxConfig(image_folder=tmp_path / "images")
    async with LocalProvider(config) as local, E2bServer(local, settings_for(root)) as server:

        async def booted(**programs: str) -> Any:
            for name, script in programs.items():
                (root / "usr/bin" / name).write_text(f"#!/usr/bin/shell\n{script}\n")
                (root / "usr/bin" / name).chmod(0o755)
            return await wire(server.url).create(templateID="task")

        yield booted


def settings_for(root: Path) -> ServerSettings:
    return ServerSettings(images=ImageMap({"task": str(root)}))


@pytest.mark.parametrize("stat", ["echo -5", "echo", r"printf '%s\\0' x"])
async def test_an_invalid_file_size_is_an_error(boot: Callable[..., Any], stat: str) -> None:
    box = await boot(stat=stat, head="exit 0")
    assert (await box.files("GET", "/etc/passwd"))[0] == 500


async def test_a_file_size_that_never_ends_is_an_error(boot: Callable[..., Any]) -> None:
    box = await boot(other=FOR_EVER)
    await box.run("mv -f /usr/bin/other /usr/bin/bash")
    async with asyncio.timeout(30):
        assert (await box.files("GET", "/etc/passwd"))[0] == 500


async def test_a_file_longer_than_announced_is_cut_off(boot: Callable[..., Any]) -> None:
    """The connection is cut as soon as that is seen, before or after the promised five bytes, and its reader is
    ended."""
    box = await boot(stat="echo 5", head=FOR_EVER)
    async with asyncio.timeout(30):
        with suppress(aiohttp.ClientError):
            assert await box.files("GET", "/etc/passwd") == (200, b" " * 5)
        while b"head\n" in await names_of_processes(box):  # noqa: ASYNC110 - no event of the server tells of it
            await asyncio.sleep(0.02)


async def names_of_processes(box: Any) -> bytes:
    try:
        told = await box.run("for file in /proc/[0-9]*/comm; do read -r name < $file && echo $name; done")
    except aiohttp.ClientError:
        # The connection that was cut.
        return b"head\n"
    assert b"bash\n" in told[0]
    return bytes(told[0])


@pytest.mark.parametrize("find", ["echo hello", r"printf 'x\\0%.0s' {1..12}", "exit 0"])
async def test_invalid_output_of_a_replaced_find_command_is_an_error(boot: Callable[..., Any], find: str) -> None:
    box = await boot(find=find)
    status, answer, _ = await box.rpc("filesystem.Filesystem/Stat", {"path": "/etc"})
    assert (status, answer["code"]) == (500, "internal")
