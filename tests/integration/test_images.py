# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC240 - tests wait for small programs and files on purpose
"""Image store: each kind of reference is unpacked once, durably, and within the size limit."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.errors import ImagePending, ImageRefused, ImageUnknown, OutOfDisk
from headrace.sandboxes.images import store as images
from headrace.sandboxes.images.debootstrap import mirror_for
from headrace.sandboxes.images.folders import StoreFolder, new_owner
from headrace.sandboxes.images.merged_tree import find
from headrace.sandboxes.images.store import ImageStore
from headrace.sandboxes.linux import syscalls
from support import image_kit as kit

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away and makes whiteouts")

GIB = 1 << 30


@pytest.fixture(scope="module", name="base")
def base_layer() -> bytes:
    layer: bytes = kit.tar(kit.base_entries())
    return layer


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", GIB)


def layers_of(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "store/layers").iterdir()}


def unpacked_folder(target: Path, base: bytes) -> Path:
    target.mkdir()
    (target.parent / "base.tar").write_bytes(base)
    subprocess.run(("tar", "-C", target, "-xpf", target.parent / "base.tar"), check=True)
    return target


def read(image: Any, path: str) -> str | None:
    found = find(image.layers, path)
    return None if found is None else found.read_text()


# References


async def test_a_root_file_system_folder_is_used_in_place(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    folder = unpacked_folder(tmp_path / "root", base)
    image = await store.resolve(str(folder))
    assert image.layers == (folder,)
    assert (image.folder, image.user, dict(image.environment)) == ("/", "root", {})
    assert layers_of(tmp_path) == set()
    (folder / "new").touch()
    assert (await store.resolve(str(folder))).digest != image.digest
    assert pickle.loads(pickle.dumps(image)) == image


@pytest.mark.parametrize("compression", ["", "gzip", "xz", "zstd"])
async def test_the_tar_of_a_root_file_system_becomes_one_layer(
    compression: str, store: ImageStore, tmp_path: Path, base: bytes
) -> None:
    (tmp_path / "image").write_bytes(kit.compress(compression, base))
    image = await store.resolve(str(tmp_path / "image"))
    (tree,) = image.layers
    assert (tree / "etc/release").read_text() == "base\n"
    assert (tree / "home/agent").stat().st_uid == 1000
    assert await store.resolve(str(tmp_path / "image")) == image


@pytest.mark.parametrize("form", ["layout", "archive", "archive.gz"])
@pytest.mark.parametrize("compression", ["gzip", "zstd", ""])
async def test_oci_layouts_and_archives_are_unpacked_into_layers(
    form: str, compression: str, store: ImageStore, tmp_path: Path, base: bytes
) -> None:
    top = kit.tar([kit.file("etc/.wh.release"), kit.file("etc/added", b"top\n")])
    settings = {"Env": ["A=1", "B=x=y"], "WorkingDir": "/workspace", "User": "agent"}
    layout = kit.Layout().image([base, top], "v1", compression=compression, settings=settings)
    target = tmp_path / form
    if form == "layout":
        layout.write(target)
    else:
        layout.archive(target, compression="gzip" if form.endswith("gz") else "")
    image = await store.resolve(f"{target}:v1")
    assert len(image.layers) == 2
    assert (read(image, "/etc/added"), read(image, "/etc/release")) == ("top\n", None)
    assert dict(image.environment) == {"A": "1", "B": "x=y"}
    assert (image.folder, image.user) == ("/workspace", "agent")
    assert {path.parent.name for path in image.layers} == {kit.sha256(layer)[7:] for layer in (base, top)}
    assert (await store.resolve(str(target))).digest == image.digest


async def test_overlayfs_can_mount_the_layers(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    """The kernel sees the same merged tree as `find`."""
    old = [kit.folder("opt/d"), kit.file("opt/d/old"), kit.file("opt/keep", b"1"), kit.link("abs", "/opt/d")]
    middle = kit.tar(old)
    top = kit.tar([kit.file("etc/.wh.release"), kit.file("opt/d/.wh..wh..opq"), kit.file("opt/d/new", b"2")])
    image = await store.resolve(str(kit.Layout().image([base, middle, top]).write(tmp_path / "layout")))
    (tmp_path / "merged").mkdir()
    lower = ":".join(str(path) for path in image.layers)
    script = f"mount -t overlay -o ro,lowerdir={lower} overlay merged && cd merged &&"
    script += " ls etc opt/d && cat opt/d/new opt/keep"
    command = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
    seen = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert seen.split() == ["etc:", "group", "passwd", "opt/d:", "new", "21"]
    paths = ("/abs/new", "/opt/d/old", "/opt/keep", "/etc/release")
    assert [read(image, path) for path in paths] == ["2", None, "1", None]


async def test_docker_archives_are_unpacked_into_layers(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    one, two = (kit.tar([kit.file("etc/which", name)]) for name in (b"one", b"two"))
    archive = kit.write_docker_archive(tmp_path / "saved.tar", {"repo/x:one": [base, one], "repo/x:two": [base, two]})
    first = await store.resolve(f"{archive}:one")
    second = await store.resolve(f"{archive}:repo/x:two")
    assert (read(first, "/etc/which"), read(second, "/etc/which")) == ("one", "two")
    assert first.layers[1] == second.layers[1]
    assert first.environment == {"KIND": "docker"}
    with pytest.raises(ImageUnknown, match="one of"):
        await store.resolve(str(archive))
    with pytest.raises(ImageUnknown, match="three"):
        await store.resolve(f"{archive}:three")


async def test_layers_are_shared_between_image_formats(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    kit.write_docker_archive(tmp_path / "saved.tar", {"x:1": [base]})
    kit.Layout().image([base], compression="zstd").write(tmp_path / "layout")
    images = [await store.resolve(str(tmp_path / name)) for name in ("saved.tar", "layout")]
    assert images[0].layers == images[1].layers
    assert len(layers_of(tmp_path)) == 1


async def test_the_image_for_this_machine_is_chosen_from_an_index(
    store: ImageStore, tmp_path: Path, base: bytes
) -> None:
    layout = kit.Layout().image([base])
    own = {**layout.manifests.pop(), "platform": {"architecture": kit.ARCHITECTURE, "os": "linux"}}
    foreign = {"digest": "sha256:" + "0" * 64, "platform": {"architecture": "s390x", "os": "linux"}}
    inner = layout.blob(json.dumps({"manifests": [foreign, own]}).encode())
    layout.manifests.append({"digest": inner, "annotations": {"org.opencontainers.image.ref.name": "multi"}})
    assert len((await store.resolve(f"{layout.write(tmp_path / 'layout')}:multi")).layers) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin:/bin") is None, reason="no debootstrap")
@pytest.mark.timeout(1800)
async def test_debootstrap_installs_a_root_file_system(store: ImageStore, tmp_path: Path) -> None:
    release = Path("/etc/os-release").read_text()
    suite = next(line.partition("=")[2] for line in release.splitlines() if line.startswith("VERSION_CODENAME="))
    image = await store.resolve(f"debootstrap:{suite}")
    assert (image.layers[0] / "usr/bin/apt-get").exists()
    assert await store.resolve(f"debootstrap:{suite}") == image
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def test_the_mirror_is_read_from_the_apt_sources() -> None:
    one_line = "# x\ndeb [signed-by=/k.gpg] http://mirror.example/debian bookworm main\ndeb-src http://s.example x y\n"
    security = "Types: deb\nURIs: http://security.example/debian-security\nSuites: bookworm-security\n"
    fields = "Types: deb\nURIs: https://fields.example/debian\nSuites: trixie trixie-updates\nComponents: main\n"
    assert mirror_for("bookworm", [security, one_line]) == "http://mirror.example/debian"
    assert mirror_for("trixie", [one_line, f"{security}\n{fields}"]) == "https://fields.example/debian"
    assert mirror_for("sid", [fields]) == "https://fields.example/debian"
    assert mirror_for("sid", [security]) is None


# Refusals


@pytest.mark.parametrize(
    "reference", ["relative/path", "", "/missing/image", "debootstrap:../x", "debootstrap:", "docker://x", "/a\0b"]
)
async def test_unknown_references_are_refused(reference: str, store: ImageStore) -> None:
    with pytest.raises(ImageUnknown):
        await store.resolve(reference)


async def test_a_fifo_is_refused_as_an_image(store: ImageStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImageRefused, match="neither"):
        await store.resolve(str(tmp_path / "pipe"))


async def test_the_host_root_is_refused_as_an_image(store: ImageStore) -> None:
    with pytest.raises(ImageRefused):
        await store.resolve("/")


async def test_a_root_file_system_without_bash_is_refused(store: ImageStore, tmp_path: Path) -> None:
    entries = [kit.file("usr/bin/sh", b"x"), kit.link("bin", "usr/bin"), kit.link("usr/bin/bash", "/bin/nowhere")]
    (tmp_path / "image.tar").write_bytes(kit.tar(entries))
    with pytest.raises(ImageRefused, match="no bash"):
        await store.resolve(str(tmp_path / "image.tar"))
    assert layers_of(tmp_path) == set()


async def test_an_image_whose_bash_is_whited_out_is_refused(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    layout = kit.Layout().image([base, kit.tar([kit.file("usr/bin/.wh.bash")])])
    with pytest.raises(ImageRefused, match="no bash"):
        await store.resolve(str(layout.write(tmp_path / "layout")))


async def test_a_bash_binary_for_another_architecture_is_refused(store: ImageStore, tmp_path: Path) -> None:
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + b"\x02\x00" + (22).to_bytes(2, "little")
    (tmp_path / "image.tar").write_bytes(kit.tar([kit.file("bin/bash", header, mode=0o755)]))
    with pytest.raises(ImageRefused, match="another kind of machine"):
        await store.resolve(str(tmp_path / "image.tar"))


async def test_an_image_for_another_architecture_is_refused(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    layout = kit.Layout().image([base], architecture="riscv64")
    with pytest.raises(ImageRefused, match="riscv64"):
        await store.resolve(str(layout.write(tmp_path / "layout")))


def flip(data: bytes) -> bytes:
    return data[:-200] + bytes([data[-200] ^ 1]) + data[-199:]


@pytest.mark.parametrize("compression", ["", "gzip"])
async def test_a_layer_that_does_not_match_its_digest_is_refused(
    compression: str, store: ImageStore, tmp_path: Path, base: bytes
) -> None:
    layout = kit.Layout().image([base], compression=compression)
    name = max(layout.files, key=lambda name: len(layout.files[name]))
    layout.files[name] = flip(layout.files[name])
    with pytest.raises(ImageRefused, match="damaged"):
        await store.resolve(str(layout.write(tmp_path / "layout")))
    assert layers_of(tmp_path) == set()
    assert list((tmp_path / "store/unpacking").iterdir()) == []


async def test_damaged_manifests_are_refused(store: ImageStore, tmp_path: Path, base: bytes) -> None:
    layout = kit.Layout().image([base])
    manifest = f"blobs/{layout.manifests[0]['digest'].replace(':', '/')}"
    damages: list[dict[str, bytes]] = [
        {manifest: layout.files[manifest] + b" "},
        {manifest: b""},
        {name: b"{}" for name in layout.files if b'"rootfs"' in layout.files[name]},
    ]
    for number, damage in enumerate(damages):
        folder = layout.write(tmp_path / f"layout{number}")
        for name, data in damage.items():
            (folder / name).write_bytes(data)
        with pytest.raises(ImageRefused, match="damaged"):
            await store.resolve(str(folder))
    for text in ('{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}', '{"manifests": 3}', "[]", "x"):
        folder = layout.write(tmp_path / "layout")
        (folder / "index.json").write_text(text)
        with pytest.raises(ImageRefused, match="damaged"):
            await store.resolve(str(folder))


async def test_a_decompression_bomb_is_refused_and_leaves_nothing_behind(tmp_path: Path, base: bytes) -> None:
    store = ImageStore(tmp_path / "store", 16 << 20)
    bomb = kit.tar([kit.file("zeros", bytes(32 << 20))])
    layout = kit.Layout().image([base, bomb])
    with pytest.raises(ImageRefused, match="max_bytes"):
        await store.resolve(str(layout.write(tmp_path / "layout")))
    assert layers_of(tmp_path) == {kit.sha256(base)[7:]}
    assert list((tmp_path / "store/unpacking").iterdir()) == []
    (tmp_path / "bomb.tar.gz").write_bytes(kit.compress("gzip", bomb))
    with pytest.raises(ImageRefused, match="max_bytes"):
        await store.resolve(str(tmp_path / "bomb.tar.gz"))


# Crashes, races, eviction


async def test_concurrent_requests_unpack_an_image_once(tmp_path: Path, base: bytes) -> None:
    """Two stores on one folder represent two processes; each sends several requests."""
    stores = [ImageStore(tmp_path / "store", GIB) for _ in range(2)]
    reference = str(kit.Layout().image([base]).write(tmp_path / "layout"))
    images = await asyncio.gather(*(store.resolve(reference) for store in stores for _ in range(4)))
    assert len(set(map(str, images))) == 1
    assert len(layers_of(tmp_path)) == 1
    assert list((tmp_path / "store/unpacking").iterdir()) == []


@pytest.fixture
def endless(tmp_path: Path, base: bytes) -> Iterator[Path]:
    """An archive that another process seems to be reading and never finishes."""
    path = tmp_path / "endless.tar"
    path.write_bytes(base)
    folder = StoreFolder(tmp_path / "store")
    folder.prepare()
    with folder.lock(images._locate(str(path)).key):
        yield path


def workers_of(folder: Path) -> list[int]:
    """Return the unpacking processes of a store, which hold one of its locks."""
    others = (process for process in Path("/proc").glob("[0-9]*") if process.name != str(os.getpid()))
    locks = folder / "locks"
    return [int(other.name) for other in others if any(file.is_relative_to(locks) for file in files_of(other))]


def files_of(process: Path) -> list[Path]:
    """Return the open files of a process, which may end or close them meanwhile."""
    found = []
    with suppress(OSError):
        for entry in (process / "fd").iterdir():
            with suppress(OSError):
                found.append(entry.readlink())
    return found


async def wait_for_worker(folder: Path) -> int:
    while not (found := workers_of(folder)):
        await asyncio.sleep(0.02)
    return found[0]


async def test_unpacking_continues_without_its_caller_and_stops_with_the_store(
    store: ImageStore, tmp_path: Path, endless: Path
) -> None:
    task = asyncio.create_task(store.resolve(str(endless)))
    pid = await wait_for_worker(tmp_path / "store")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ImagePending):
        await store.resolve(str(endless), patience_s=0.05)
    assert workers_of(tmp_path / "store") == [pid]
    await store.aclose()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_slow_unpacking_continues_and_a_later_request_gets_the_image(
    store: ImageStore, tmp_path: Path, base: bytes
) -> None:
    path = tmp_path / "slow.tar"
    path.write_bytes(base)
    folder = StoreFolder(tmp_path / "store")
    folder.prepare()
    with folder.lock(images._locate(str(path)).key):
        for _ in range(3):
            with pytest.raises(ImagePending) as caught:
                await store.resolve(str(path), patience_s=0.01)
            assert caught.value.retry_after_s > 0
    assert (await store.resolve(str(path))).layers


async def test_leftovers_of_a_killed_process_are_removed(
    store: ImageStore, tmp_path: Path, base: bytes, endless: Path
) -> None:
    """A process that resolves an image is killed; its worker dies with it; the next store cleans up."""
    script = """
import asyncio, pathlib, sys
from headrace.sandboxes.images.store import ImageStore
asyncio.run(ImageStore(pathlib.Path(sys.argv[1]), 1 << 30).resolve(sys.argv[2]))
"""
    process = subprocess.Popen((sys.executable, "-c", script, str(tmp_path / "store"), str(endless)))
    worker = await wait_for_worker(tmp_path / "store")
    left = tmp_path / "store/unpacking" / new_owner(worker)
    (left / "tree/deep").mkdir(parents=True)
    descriptor = os.pidfd_open(worker)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with os.fdopen(descriptor):
        await asyncio.get_running_loop().run_in_executor(None, wait_for_end, descriptor)
    (tmp_path / "base.tar").write_bytes(base)
    await store.resolve(str(tmp_path / "base.tar"))
    assert not left.exists()
    assert list((tmp_path / "store/unpacking").iterdir()) == []


def wait_for_end(descriptor: int) -> None:
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(30_000)


async def test_a_full_disk_raises_out_of_disk_and_leaves_no_partial_layer(tmp_path: Path, base: bytes) -> None:
    small = tmp_path / "small"
    small.mkdir()
    syscalls.mount("tmpfs", str(small), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=2m,mode=700")
    try:
        (tmp_path / "base.tar").write_bytes(base)
        store = ImageStore(small / "store", GIB)
        with pytest.raises(OutOfDisk) as caught:
            await store.resolve(str(tmp_path / "base.tar"))
        assert caught.value.transient
        assert list((small / "store/layers").iterdir()) == []
        assert list((small / "store/unpacking").iterdir()) == []
    finally:
        syscalls.detach(str(small))


def archives(tmp_path: Path, base: bytes, count: int) -> list[str]:
    """Make images of about the same size without common layers."""
    paths = []
    for number in range(count):
        layer = kit.tar([*kit.base_entries(), kit.file("etc/number", str(number).encode())])
        paths.append(str(kit.Layout().image([layer], compression="").write(tmp_path / f"layout{number}")))
    return paths


async def test_the_least_recently_used_image_is_evicted_first(tmp_path: Path, base: bytes) -> None:
    size = len(base) + (1 << 20)
    store = ImageStore(tmp_path / "store", 2 * size + size // 2)
    one, two, three = archives(tmp_path, base, 3)
    first, second = await store.resolve(one), await store.resolve(two)
    async with store.use(one):
        pass
    third = await store.resolve(three)
    assert [image.layers[0].exists() for image in (first, second, third)] == [True, False, True]
    assert (await store.resolve(two)).layers[0].exists()
    assert len(layers_of(tmp_path)) == 2


async def test_leased_images_are_never_evicted(tmp_path: Path, base: bytes) -> None:
    store, other = (ImageStore(tmp_path / "store", len(base) + (2 << 20)) for _ in range(2))
    one, two, three = archives(tmp_path, base, 3)
    async with store.use(one) as image:
        lease = await store.lease(one)
        await other.resolve(two)
        assert image.layers[0].exists()
    await other.resolve(three)
    assert image.layers[0].exists()
    await lease.release()
    await lease.release()
    await other.resolve(two)
    assert not image.layers[0].exists()


async def test_a_lease_of_a_dead_process_is_ignored(tmp_path: Path, base: bytes) -> None:
    store = ImageStore(tmp_path / "store", len(base) + (2 << 20))
    one, two = archives(tmp_path, base, 2)
    with subprocess.Popen(("sleep", "1000")) as holder:
        lease = await store.lease(one, holder_pid=holder.pid)
        await store.resolve(two)
        assert lease.image.layers[0].exists()
        holder.kill()
    with pytest.raises(ProcessLookupError):
        await store.lease(one, holder_pid=holder.pid)
    folder = StoreFolder(tmp_path / "store")
    assert folder.leased() == set()
    folder.evict(0)
    assert layers_of(tmp_path) == set()
