"""Folders of the host in local sandboxes: one copy for all, in any image, and no way to change them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.base import Feature, FrozenMount, HostFolder, Sandbox, SandboxSpec
from headrace.sandboxes.errors import SandboxError, SpecRefused, Unsupported
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.simulated.provider import SimulatedProvider
from support import image_kit as kit

pytestmark = pytest.mark.namespaces
TARGET = "/opt/tools/one"


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        yield provider


@pytest.fixture
def tools(tmp_path: Path) -> HostFolder:
    """Folder with a program, a private file and a set-user-id copy of `id`."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "say").write_text("#!/bin/sh\necho said\n")
    (folder / "say").chmod(0o755)
    (folder / "secret").write_text("not for everyone")
    (folder / "secret").chmod(0o600)
    (folder / "id").write_bytes(Path("/usr/bin/id").read_bytes())
    (folder / "id").chmod(0o4755)
    return HostFolder(source=str(folder), target=TARGET)


async def boot(provider: LocalProvider, *folders: HostFolder, **spec: Any) -> Sandbox:
    return await provider.attach(await provider.create(SandboxSpec(folders=folders, **spec)))


async def run(sandbox: Sandbox, command: str, user: str = "root") -> tuple[int, str]:
    result = await sandbox.exec(command, user=user, timeout_s=30)
    return result.exit_code, (result.stdout + result.stderr).decode().strip()


async def test_programs_in_host_folders_run_and_files_cannot_be_changed(
    provider: LocalProvider, tools: HostFolder
) -> None:
    sandbox = await boot(provider, tools)
    assert await run(sandbox, f"{TARGET}/say", user="agent") == (0, "said")
    assert await run(sandbox, f"stat -c '%U %a' {TARGET}/say") == (0, "root 755")
    assert (await run(sandbox, f"cat {TARGET}/secret", user="agent"))[0] != 0
    _, identity = await run(sandbox, f"{TARGET}/id -u", user="agent")
    assert identity == "1000", "set-user-id means nothing"
    for attempt in ("echo > new", "rm say", "chmod 777 secret", "chown 1000 say"):
        code, said = await run(sandbox, f"cd {TARGET} && {attempt}")
        assert (code != 0, "Read-only file system" in said) == (True, True), said
    for attempt in (f"mount -o remount,rw {TARGET}", f"umount {TARGET}"):
        assert (await run(sandbox, attempt))[0] != 0
    assert sorted(os.listdir(tools.source)) == ["id", "say", "secret"]  # noqa: PTH208


async def test_sandboxes_share_one_copy_of_a_folder_and_use_no_layer_space_for_it(
    provider: LocalProvider, tools: HostFolder
) -> None:
    await asyncio.to_thread(Path(tools.source, "large").write_bytes, os.urandom(32 << 20))
    for sandbox in await asyncio.gather(*(boot(provider, tools) for _ in range(3))):
        assert await run(sandbox, f"wc -c < {TARGET}/large") == (0, str(32 << 20))
        assert (await sandbox.usage()).disk_bytes < 1 << 20
    assert await provider.images() == ()


async def test_host_folders_are_visible_in_images_but_not_in_clones(provider: LocalProvider, tools: HostFolder) -> None:
    first = await boot(provider, tools)
    await run(first, f"echo kept > kept; cp {TARGET}/say .")
    image = await first.snapshot()
    clone = await boot(provider, image=image)
    assert await run(clone, f"cat kept; ls {TARGET} | wc -l") == (0, "kept\n0"), "a snapshot does not hold the folder"
    again = await boot(provider, tools, image=image)
    assert await run(again, f"{TARGET}/say; cat kept", user="agent") == (0, "said\nkept")


async def test_frozen_data_does_not_include_host_folders(provider: LocalProvider, tools: HostFolder) -> None:
    ref = await provider.create(SandboxSpec(folders=(tools,)))
    agent = await provider.attach(ref)
    await run(agent, "echo done > result")
    await agent.freeze()
    mounts = (
        FrozenMount(source=ref.id, path="/workspace", target="/workspace"),
        FrozenMount(source=ref.id, path="/opt", target="/left"),
    )
    clean = await provider.attach(await provider.create(SandboxSpec(mounts=mounts)))
    assert await run(clean, f"cat result; ls /left/tools/one | wc -l; ls {TARGET}") == (
        2,
        f"done\n0\nls: cannot access '{TARGET}': No such file or directory",
    )


async def test_a_replaced_folder_is_passed_to_the_launcher_again(
    provider: LocalProvider, tools: HostFolder, tmp_path: Path
) -> None:
    before = await boot(provider, tools)
    (tmp_path / "tools").rename(tmp_path / "old")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "say").write_text("new")
    after = await boot(provider, tools)
    assert await run(after, f"cat {TARGET}/say") == (0, "new")
    assert await run(before, f"{TARGET}/say") == (0, "said")


async def test_the_folder_is_passed_to_a_restarted_launcher(provider: LocalProvider, tools: HostFolder) -> None:
    await boot(provider, tools)
    assert provider.launcher_pid is not None
    os.kill(provider.launcher_pid, 9)
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        try:
            sandbox = await boot(provider, tools)
            break
        except SandboxError as error:
            assert error.transient, error
            assert asyncio.get_running_loop().time() < deadline
    assert await run(sandbox, f"{TARGET}/say") == (0, "said")


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("/does/not/exist", TARGET, "No such file"),
        ("tests", TARGET, "absolute path"),
        ("/etc/hostname", TARGET, "folder on the host"),
        (".", "/usr/tools", "outside"),
        (".", "/opt/../usr", "outside"),
        (".", "opt", "outside"),
    ],
)
async def test_invalid_folders_are_refused(
    provider: LocalProvider, tmp_path: Path, source: str, target: str, said: str
) -> None:
    source = str(tmp_path) if source == "." else source
    with pytest.raises(SpecRefused, match=said):
        await provider.create(SandboxSpec(folders=(HostFolder(source=source, target=target),)))
    assert await provider.list() == []


async def test_a_provider_without_folders_raises_unsupported(tools: HostFolder) -> None:
    provider = SimulatedProvider()
    assert Feature.FOLDERS not in provider.features
    with pytest.raises(Unsupported, match=TARGET):
        await provider.create(SandboxSpec(folders=(tools,)))
    await provider.aclose()


async def test_a_symbolic_link_in_the_image_cannot_redirect_a_folder(
    provider: LocalProvider, tools: HostFolder, tmp_path: Path
) -> None:
    layer = kit.tar((*kit.base_entries(), kit.link("opt", "/etc")))
    image = kit.Layout().image([layer]).write(tmp_path / "layout")
    with pytest.raises(SandboxError, match="symbolic link"):
        await provider.create(SandboxSpec(image=str(image), folders=(tools,)))
