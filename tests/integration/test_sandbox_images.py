"""Images of local sandboxes: snapshots and clones, root file systems, OCI layers, and frozen data above them."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.base import FrozenMount, ImageRef, Sandbox, SandboxSpec
from headrace.sandboxes.errors import (
    ImagePending,
    ImageRefused,
    ImageUnknown,
    SandboxGone,
    SpecRefused,
)
from headrace.sandboxes.linux import rootfs
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from support import image_kit as kit

pytestmark = pytest.mark.namespaces


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image of two layers, of which the upper one hides a file and a folder of the lower one."""
    folder = tmp_path_factory.mktemp("image")
    lower = kit.tar(
        (
            *kit.base_entries(),
            kit.folder("data", uid=1234, gid=1234),
            kit.file("data/owned", b"lower", uid=1234, gid=1234),
            kit.file("data/hidden", b"lower"),
            kit.folder("old"),
            kit.file("old/thing", b"lower"),
            kit.file("etc/passwd", b"root:x:0:0::/root:/bin/bash\nsomebody:x:1234:1234::/data:/bin/bash\n"),
        )
    )
    upper = kit.tar((kit.file("data/.wh.hidden"), kit.file(".wh.old"), kit.file("data/new", b"upper")))
    settings = {"Env": ["GREETING=hello"], "WorkingDir": "/data"}
    written: Path = kit.Layout().image([lower, upper], settings=settings).write(folder / "layout")
    return written


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        yield provider


async def boot(provider: LocalProvider, image: str, **spec: Any) -> Sandbox:
    while True:
        with suppress(ImagePending):  # a busy disk unpacks slowly
            return await provider.attach(await provider.create(SandboxSpec(image=image, **spec)))


async def output(sandbox: Sandbox, command: str, *, user: str = "root") -> str:
    result = await sandbox.exec(command, user=user, timeout_s=30)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


# Snapshots


@kit.needs_snapshots
async def test_clones_share_only_the_prepared_files(provider: LocalProvider) -> None:
    prepared = await boot(provider, "host")
    await output(prepared, "mkdir -p /opt/tool && echo v1 > /opt/tool/version && chown agent /opt/tool/version")
    await output(prepared, "echo 'new:x:2000:2000::/home/new:/bin/bash' >> /etc/passwd")
    image = await prepared.snapshot()
    with pytest.raises(SandboxGone):
        await prepared.exec("true", timeout_s=30)
    first, second = await asyncio.gather(boot(provider, image), boot(provider, image))
    await output(first, "echo v2 > /opt/tool/version; rm -r /home/agent; echo mine > /tmp/mine")
    assert await output(second, "cat /opt/tool/version; stat -c %U:%u /opt/tool/version") == "v1\nagent:1000"
    assert await output(second, "ls /tmp /home") == "/home:\nagent\n\n/tmp:"
    assert await output(second, "id -un; touch /tmp/f; stat -c %U /tmp/f", user="new") == "new\nnew"
    assert await output(first, "cat /opt/tool/version; ls /home") == "v2"


@kit.needs_snapshots
async def test_a_clone_is_as_isolated_as_any_sandbox(provider: LocalProvider) -> None:
    image = await (await boot(provider, "host")).snapshot()
    clone = await boot(provider, image)
    for attempt in ("touch /usr/planted", "mount -t tmpfs none /mnt", "mknod /tmp/d c 1 3", "unshare -U true"):
        assert (await clone.exec(attempt, timeout_s=30)).exit_code != 0, attempt
    assert await output(clone, "cat /proc/self/uid_map | tr -s ' '") != ""
    status = await output(clone, "grep -E 'CapEff|NoNewPrivs' /proc/self/status")
    assert status.split() == ["CapEff:", "00000000000000fb", "NoNewPrivs:", "1"]


@kit.needs_snapshots
async def test_a_snapshot_of_a_clone_has_both_layers(provider: LocalProvider) -> None:
    image = ImageRef("host")
    for number in range(4):
        sandbox = await boot(provider, image)
        await output(sandbox, f"echo {number} > /opt/{number}; rm -f /opt/{number - 2}")
        image = await sandbox.snapshot()
    assert await output(await boot(provider, image), "ls /opt; cat /opt/3") == "2\n3\n3"


@pytest.mark.slow
async def test_the_number_of_stacked_snapshots_is_limited(provider: LocalProvider) -> None:
    image = "host"
    for _ in range(rootfs.MAX_LAYERS):
        image = await (await boot(provider, image)).snapshot()
    highest = await boot(provider, image)
    with pytest.raises(SpecRefused):
        await highest.snapshot()
    assert await output(highest, "echo alive") == "alive"


@kit.needs_snapshots
async def test_folders_of_a_lower_layer_can_be_renamed(provider: LocalProvider) -> None:
    sandbox = await boot(provider, "host")
    await output(sandbox, "mkdir -p /opt/a/b && echo text > /opt/a/b/file")
    clone = await boot(provider, await sandbox.snapshot())
    assert await output(clone, "mv /opt/a /opt/z && cat /opt/z/b/file && ls /opt") == "text\nz"
    assert await output(await boot(provider, await clone.snapshot()), "cat /opt/z/b/file && ls /opt") == "text\nz"


@kit.needs_snapshots
async def test_frozen_data_of_a_clone_contains_both_layers(provider: LocalProvider) -> None:
    prepared = await boot(provider, "host")
    await output(prepared, "mkdir /workspace/repo; echo old > /workspace/repo/kept; echo old > /workspace/repo/gone")
    image = await prepared.snapshot()
    agent = await boot(provider, image)
    await output(agent, "cd /workspace/repo; echo new > added; rm gone; echo more >> kept", user="root")
    await agent.freeze()
    mount = FrozenMount(source=agent.id, path="/workspace/repo", target="/mnt/repo")
    for look_from in ("host", image):
        clean = await boot(provider, look_from, mounts=(mount,))
        assert (
            await output(clean, "cd /mnt/repo; ls; cat kept added; stat -c %U kept")
            == "added\nkept\nold\nmore\nnew\nroot"
        )
        assert (await clean.exec("touch /mnt/repo/x", timeout_s=30)).exit_code != 0


@kit.needs_snapshots
async def test_a_frozen_sandbox_can_become_an_image(provider: LocalProvider) -> None:
    sandbox = await boot(provider, "host")
    await output(sandbox, "echo kept > /opt/file")
    await sandbox.freeze()
    assert await output(await boot(provider, await sandbox.snapshot()), "cat /opt/file") == "kept"


@kit.needs_snapshots
async def test_images_can_be_dropped_only_when_unused(provider: LocalProvider) -> None:
    image = await (await boot(provider, "host")).snapshot()
    clone = await boot(provider, image)
    assert await provider.images() == (image,)
    assert not await provider.drop_image(image)
    assert not await provider.drop_image(ImageRef("host"))
    await clone.kill()
    assert await provider.drop_image(image)
    assert await provider.drop_image(image)
    assert await provider.images() == ()
    with pytest.raises(ImageUnknown):
        await boot(provider, image)


@kit.needs_snapshots
async def test_ids_of_a_snapshot_are_not_reused(provider: LocalProvider) -> None:
    """The next sandbox must not get the ids of an image's files: it would own them on the host."""
    sandbox = await boot(provider, "host")
    ids = await output(sandbox, "cat /proc/self/uid_map")
    image = await sandbox.snapshot()
    clone, plain = await boot(provider, image), await boot(provider, "host")
    assert len({ids, await output(clone, "cat /proc/self/uid_map"), await output(plain, "cat /proc/self/uid_map")}) == 3


async def test_a_kill_during_a_snapshot_leads_to_an_error_or_a_usable_image(provider: LocalProvider) -> None:
    sandbox = await boot(provider, "host")
    becoming = asyncio.ensure_future(sandbox.snapshot())
    await asyncio.sleep(0)
    await sandbox.kill()
    try:
        image = await becoming
    except SandboxGone:
        assert await provider.images() == ()
    else:
        assert await provider.drop_image(image)


# Imported images


async def test_an_oci_image_boots(provider: LocalProvider, archive: Path) -> None:
    sandbox = await boot(provider, str(archive))
    assert await output(sandbox, "pwd; ls") == "/data\nnew\nowned"
    assert "old" not in (await output(sandbox, "ls /")).split()
    assert await output(sandbox, "echo $GREETING; id -u; cat owned", user="somebody") == "hello\n1234\nlower"
    assert (
        await output(sandbox, "echo more >> owned; cat owned; cat /etc/hostname", user="somebody")
        == "lowermore\nsandbox"
    )
    assert (await sandbox.exec("echo more >> /etc/passwd", user="somebody", timeout_s=30)).exit_code != 0
    other = await boot(provider, str(archive))
    assert await output(other, "cat owned") == "lower"


async def test_an_image_is_unpacked_once_and_its_layers_are_not_modified(
    provider: LocalProvider, archive: Path, tmp_path: Path
) -> None:
    await asyncio.gather(*(boot(provider, str(archive)) for _ in range(6)))
    layers = await asyncio.to_thread(lambda: sorted((tmp_path / "images/layers").iterdir()))
    assert len(layers) == 2
    sandbox = await boot(provider, str(archive))
    await output(sandbox, "rm /data/owned; mkdir /made; echo x > /etc/x")
    owned = [layer / "tree/data/owned" for layer in layers if (layer / "tree/data/owned").exists()]
    assert [(path.read_bytes(), path.stat().st_uid) for path in owned] == [(b"lower", 1234)]
    assert len(await provider.images()) == 1


async def test_a_root_file_system_folder_boots_in_place(provider: LocalProvider, tmp_path: Path) -> None:
    root = tmp_path / "root"
    await asyncio.to_thread(_unpack, root)
    sandbox = await boot(provider, str(root))
    assert await output(sandbox, "pwd; id -u; touch /etc/new; ls /etc/new") == "/\n0\n/etc/new"
    assert not (root / "etc/new").exists()
    assert (root / "bin").exists()


@kit.needs_snapshots
async def test_a_snapshot_of_an_imported_image_boots(provider: LocalProvider, archive: Path) -> None:
    sandbox = await boot(provider, str(archive))
    await output(sandbox, "echo mine > /data/mine; rm /data/new")
    clone = await boot(provider, await sandbox.snapshot())
    assert await output(clone, "ls /data; pwd; echo $GREETING") == "mine\nowned\n/data\nhello"


async def test_unbootable_images_are_refused(provider: LocalProvider, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for reference in ("ubuntu", str(tmp_path / "absent"), "snapshot:absent", "../x", "", "debootstrap:no/suite"):
        with pytest.raises(ImageUnknown):
            await boot(provider, reference)
    with pytest.raises(ImageRefused):
        await boot(provider, str(tmp_path / "empty"))
    hostile = tmp_path / "hostile"
    await asyncio.to_thread(_unpack, hostile)
    (hostile / "proc").rmdir()
    (hostile / "proc").symlink_to(tmp_path)
    with pytest.raises(ImageRefused):
        await boot(provider, str(hostile))
    assert await provider.list() == []


async def test_at_most_max_images_are_kept_ready(tmp_path: Path) -> None:
    config = LocalSandboxConfig(image_folder=tmp_path / "images", max_images=1)
    async with LocalProvider(config) as provider:
        for name in ("a", "b", "c"):
            await asyncio.to_thread(_unpack, tmp_path / name)
        used = await boot(provider, str(tmp_path / "a"))
        other = await boot(provider, str(tmp_path / "b"))
        assert len(await provider.images()) == 2
        await used.kill()
        await other.kill()
        await boot(provider, str(tmp_path / "c"))
        assert len(await provider.images()) == 1


async def test_a_dropped_image_is_prepared_again_on_demand(tmp_path: Path) -> None:
    """The image was dropped by this provider, or by another one of the same launcher."""
    await asyncio.to_thread(_unpack, tmp_path / "a")
    reference = str(tmp_path / "a")
    config = LocalSandboxConfig(image_folder=tmp_path / "images", stays_in=tmp_path / "stays")
    async with LocalProvider(config) as provider, LocalProvider(config) as other:
        assert provider.launcher_pid == other.launcher_pid
        for dropper in (provider, other):
            await (await boot(provider, reference)).kill()
            [name] = await dropper.images()
            assert await dropper.drop_image(name)
        assert await output(await boot(provider, reference), "echo fine") == "fine"


async def test_concurrent_boots_from_a_new_image_lease_it_once(tmp_path: Path) -> None:
    """F11."""
    archive = await asyncio.to_thread(kit.Layout().image([kit.tar(kit.base_entries())]).write, tmp_path / "layout")
    config = LocalSandboxConfig(image_folder=tmp_path / "images")
    async with LocalProvider(config) as provider:
        await asyncio.gather(*(boot(provider, str(archive)) for _ in range(5)))
        assert len(list((tmp_path / "images" / "leases").iterdir())) == 1


async def test_an_image_with_a_hundred_layers_boots(tmp_path: Path) -> None:
    layers = [kit.tar(kit.base_entries()), *(kit.tar((kit.file(f"etc/{n}", b"x"),)) for n in range(99))]
    archive = await asyncio.to_thread(kit.Layout().image(layers).write, tmp_path / "layout")
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        assert await output(await boot(provider, str(archive)), "cat /etc/98 /etc/0") == "xx"


def _unpack(target: Path) -> None:
    target.mkdir()
    archive = target.with_suffix(".tar")
    archive.write_bytes(kit.tar(kit.base_entries()))
    with tarfile.open(archive) as tar:
        tar.extractall(target, **kit.TRUSTED)
    assert os.path.lexists(target / "bin")
