"""`headrace image`, and named images as templates of a sandbox server."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from typer.testing import CliRunner, Result

from headrace.actors.cli.app import app
from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import BootFailed, ImageRefused, ImageUnknown, SandboxError, SpecRefused
from headrace.sandboxes.images.adding import add_image
from headrace.sandboxes.images.catalog import ImageCatalog
from headrace.sandboxes.images.store import ImageStore, UnpackProgress
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import BOOTS, ImageMap, checked
from support import image_kit as kit

pytestmark = pytest.mark.namespaces


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ImageStore]:
    store = ImageStore(tmp_path / "store", 1 << 30)
    yield store
    await store.aclose()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The tar of a root file system."""
    path = tmp_path / "root.tar"
    path.write_bytes(kit.tar(kit.base_entries()))
    return path


def run(*words: str | Path, folder: Path) -> Result:
    return CliRunner().invoke(app, ["image", *map(str, words), "--image-folder", str(folder)])


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("list", "--json", "-", folder=folder).stdout)
    return found


def left(folder: Path) -> set[str]:
    """What an unsuccessful add must not leave."""
    return {
        str(path.relative_to(folder)) for top in ("named", "unpacking", "leases") for path in (folder / top).rglob("*")
    }


def sources(tmp_path: Path, archive: Path) -> dict[str, str]:
    """One source of each kind that needs no network, all with the same files."""
    layer = kit.tar(kit.base_entries())
    layout = kit.Layout().image([layer]).write(tmp_path / "layout")
    docker = kit.write_docker_archive(tmp_path / "docker.tar", {"own:1": [layer]})
    folder = tmp_path / "folder"
    folder.mkdir()
    subprocess.run(("tar", "xf", archive, "-C", folder), check=True)
    return {"tar": str(archive), "layout": str(layout), "docker": str(docker), "folder": str(folder)}


def test_each_kind_of_source_is_added_listed_checked_and_pruned(tmp_path: Path, archive: Path) -> None:
    folder = tmp_path / "store"
    for kind, source in sources(tmp_path, archive).items():
        done = run("add", kind, source, folder=folder)
        assert done.exit_code == 0, done.output
    found = listed(folder)
    assert [image["name"] for image in found] == ["docker", "folder", "layout", "tar"]
    assert all(image["size_bytes"] > 1 << 20 and image["network"] == "none" for image in found)
    # The source is not needed any more.
    subprocess.run(("rm", "-r", tmp_path / "folder"), check=True)
    for kind in ("folder", "docker"):
        words = ("doctor", "--image", kind, "--image-folder", str(folder), "--json", "-")
        done = CliRunner().invoke(app, words)
        report = json.loads(done.stdout)
        assert (done.exit_code, report["root"], report["user"], report["programs"]["bash"]) == (0, True, True, True)
        assert report["boot_p50_ms"] > 0
    kept = json.loads(run("prune", "--dry-run", "folder", "--json", "-", folder=folder).stdout)
    assert len(listed(folder)) == 4
    done = run("prune", *(image["name"] for image in found), folder=folder)
    assert done.exit_code == 0, done.output
    assert (listed(folder), list((folder / "layers").iterdir()), left(folder)) == ([], [], set())
    assert kept["freed_bytes"] >= 0


def test_a_name_is_replaced_only_on_request(tmp_path: Path, archive: Path) -> None:
    folder = tmp_path / "store"
    assert run("add", "one", archive, folder=folder).exit_code == 0
    again = run("add", "one", archive, folder=folder)
    assert again.exit_code != 0
    assert isinstance(again.exception, SandboxError)
    assert "'one' exists" in str(again.exception)
    assert run("add", "one", archive, "--replace", folder=folder).exit_code == 0


@pytest.mark.parametrize(
    ("name", "entries", "wanted"),
    [
        ("ok", (kit.file("usr/bin/true", b"x"),), "no bash"),
        ("ok", (*kit.base_entries(), kit.file("../out", b"x")), "unsafe archive"),
        ("../x", kit.base_entries(), "image name"),
        ("a/../b", kit.base_entries(), "image name"),
        ("", kit.base_entries(), "image name"),
    ],
)
async def test_bad_images_are_refused_and_leave_nothing(
    store: ImageStore, tmp_path: Path, name: str, entries: tuple[kit.Entry, ...], wanted: str
) -> None:
    (tmp_path / "bad.tar").write_bytes(kit.tar(entries))
    with pytest.raises((ImageRefused, SpecRefused), match=wanted):
        await add_image(store, name, str(tmp_path / "bad.tar"))
    assert left(tmp_path / "store") == set()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["/", "docker://own/image", "/no/such", "debootstrap:../x", "image:other", "host"])
async def test_sources_that_cannot_be_added_say_why(store: ImageStore, tmp_path: Path, source: str) -> None:
    if source.startswith("docker:") and shutil.which("skopeo"):
        pytest.skip("skopeo is installed here")
    with pytest.raises((ImageUnknown, ImageRefused, SpecRefused), match=source.rpartition("/")[0] or source):
        await add_image(store, "one", source)
    assert left(tmp_path / "store") == set()


ADD = """
import asyncio, sys
from pathlib import Path
from headrace.sandboxes.images.adding import add_image
from headrace.sandboxes.images.store import ImageStore, UnpackProgress
store = ImageStore(Path(sys.argv[1]), 1 << 30)
store.on_progress = lambda *_: print("progress", flush=True)
asyncio.run(add_image(store, "one", sys.argv[2]))
"""


def test_a_killed_add_leaves_nothing_that_lasts(tmp_path: Path, archive: Path) -> None:
    folder = tmp_path / "store"
    (tmp_path / "big").mkdir()
    with (tmp_path / "big" / "hole").open("wb") as file:
        file.truncate(1 << 30)
    adding = subprocess.Popen((sys.executable, "-c", ADD, folder, tmp_path / "big"), stdout=subprocess.PIPE)
    assert adding.stdout is not None
    while not any((folder / "unpacking").glob("*/archive")) if folder.exists() else True:
        assert adding.poll() is None
    children = psutil.Process(adding.pid).children()
    adding.send_signal(signal.SIGKILL)
    adding.wait()
    adding.stdout.close()
    assert psutil.wait_procs(children, timeout=30)[1] == [], "what packs the folder ends with its parent"
    assert run("add", "one", archive, folder=folder).exit_code == 0
    assert [image["name"] for image in listed(folder)] == ["one"]
    assert {name for name in left(folder) if name.startswith("unpacking")} == set()


async def test_two_adds_of_one_name_at_once_give_one_image(store: ImageStore, archive: Path) -> None:
    results = await asyncio.gather(*(add_image(store, "one", str(archive), replaces=True) for _ in range(2)))
    assert results[0].digest == results[1].digest
    assert [image.name for image in ImageCatalog(store.files).all()] == ["one"]


async def test_named_images_boot_and_are_never_evicted(store: ImageStore, tmp_path: Path, archive: Path) -> None:
    await add_image(store, "one", str(archive))
    assert await asyncio.to_thread(store.files.evict, 0) == 0
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "store")) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec(image="image:one")))
        assert (await sandbox.exec("cat /etc/release", timeout_s=30)).stdout == b"base\n"
        with pytest.raises(ImageUnknown, match="image:two"):
            await provider.create(SandboxSpec(image="image:two"))


async def test_a_server_checks_its_image_map_and_finds_named_images(store: ImageStore, archive: Path) -> None:
    await add_image(store, "one", str(archive))
    await add_image(store, "own/two", str(archive))
    images = checked(None, ImageMap({"task": str(archive), "named": "image:one"}), store)
    assert images.resolve("one", {}, {}) == "image:one"
    assert images.resolve("named", {}, {}) == "image:one"
    for unknown in ("own/two", "two", "../one"):
        with pytest.raises(ImageUnknown):
            images.resolve(unknown, {}, {})
    for wrong in ("/no/such", "image:three", "debootstrap:..", "relative"):
        with pytest.raises(SpecRefused, match=r"--image-map map\.toml: task = "):
            checked(Path("map.toml"), ImageMap({"task": wrong}), store)


async def test_creates_wait_for_an_image_and_keep_no_others_from_booting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process holds the layer: as far as the server knows, it unpacks."""
    layer = kit.tar(kit.base_entries())
    layout = kit.Layout().image([layer]).write(tmp_path / "layout")
    caplog.set_level(logging.INFO)
    body = {"templateID": "slow", "timeout": 1}
    async with (
        LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "store", image_patience_s=0.1)) as provider,
        E2bServer(provider, ServerSettings(images=ImageMap({"slow": str(layout)}))) as server,
        aiohttp.ClientSession(headers={"X-API-KEY": "any"}, connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        reports: list[UnpackProgress] = []
        seen = asyncio.Event()

        def report(_reference: str, progress: UnpackProgress) -> None:
            reports.append(progress)
            seen.set()

        provider.store.on_progress = report
        await asyncio.to_thread(provider.store.files.prepare)

        async def create(name: str) -> int:
            async with client.post(f"{server.url}/v2/sandboxes", json={**body, "templateID": name}) as response:
                return response.status

        digest = kit.sha256(layer).removeprefix("sha256:")
        with FileLock(tmp_path / "store" / "locks" / digest):
            waiting = [asyncio.create_task(create("slow")) for _ in range(BOOTS + 4)]
            async with asyncio.timeout(60):
                await seen.wait()
            assert reports[0] == UnpackProgress(layer=1, layers=1, bytes=0)
            assert await create("base") == 201
            assert not any(one.done() for one in waiting)
        assert await asyncio.gather(*waiting) == [201] * len(waiting)
    assert f"image {layout}: unpacking layer 1 of 1" in caplog.text


async def test_a_damaged_entry_is_named_and_keeps_every_layer(
    store: ImageStore, tmp_path: Path, archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await add_image(store, "one", str(archive))
    await add_image(store, "two", str(archive), replaces=True)
    damaged = next(path for path in store.files.named() if json.loads(path.read_bytes())["name"] == "one")
    damaged.write_text('{"name": "one"')
    with pytest.raises(ImageRefused, match=damaged.name):
        await store.resolve("image:one")
    assert [image.name for image in ImageCatalog(store.files).all()] == ["two"]
    assert damaged.name in caplog.text
    # Other images are unpacked all the same, and nothing is evicted that the entry may protect.
    other = kit.Layout().image([kit.tar((*kit.base_entries(), kit.file("etc/more", b"x")))]).write(tmp_path / "layout")
    assert (await store.resolve(str(other))).layers
    assert await asyncio.to_thread(store.files.evict, 0) == 0
    said = run("prune", folder=tmp_path / "store")
    assert damaged.name in str(said.exception)


async def test_a_worker_that_is_killed_is_a_failed_boot(store: ImageStore, tmp_path: Path) -> None:
    layer = kit.tar(kit.base_entries())
    layout = kit.Layout().image([layer]).write(tmp_path / "layout")
    await asyncio.to_thread(store.files.prepare)
    seen = asyncio.Event()
    store.on_progress = lambda _reference, _progress: seen.set()
    with FileLock(tmp_path / "store" / "locks" / kit.sha256(layer).removeprefix("sha256:")):
        resolving = asyncio.create_task(store.resolve(str(layout)))
        async with asyncio.timeout(60):
            await seen.wait()
        [worker] = [child for child in psutil.Process().children() if "images.worker" in " ".join(child.cmdline())]
        worker.kill()
        with pytest.raises(BootFailed, match="status -9"):
            await resolving


async def test_a_folder_larger_than_the_store_is_refused_while_it_is_packed(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "data").write_bytes(bytes(range(256)) * (1 << 16))
    store = ImageStore(tmp_path / "store", 4 << 20)
    with pytest.raises(ImageRefused, match=r"larger than the image store"):
        await add_image(store, "big", str(tmp_path / "big"))
    assert left(tmp_path / "store") == set()
