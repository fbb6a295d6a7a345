"""Image builds in real sandboxes: steps, layers, the cache, and hostile steps and archives."""

from __future__ import annotations

import io
import os
import socket
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.sandboxes.base import Network, SandboxSpec
from headrace.sandboxes.errors import ImageRefused, ImageUnknown, SpecRefused
from headrace.sandboxes.images.build_context import store_archive, store_files
from headrace.sandboxes.images.build_steps import BuildLimits, BuildRefused, BuildStep, Recipe, StepKind
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.images.catalog import ImageCatalog, StoredImage
from headrace.sandboxes.images.dockerfile import parse
from headrace.sandboxes.images.layers import UnpackLimits
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from support.image_kit import base_entries, entry, file, folder, hard_link, link, tar

pytestmark = pytest.mark.namespaces
LIMITS = UnpackLimits(64 << 20)


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    config = LocalSandboxConfig(image_folder=tmp_path / "images", allow_host_network=True)
    async with LocalProvider(config) as provider:
        provider.store.files.prepare()
        yield provider


@pytest.fixture
def builder(provider: LocalProvider) -> ImageBuilder:
    return ImageBuilder(provider)


def step(kind: str, *arguments: str, context: str = "") -> BuildStep:
    return BuildStep(kind=StepKind(kind), arguments=arguments, context=context)


def context_of(provider: LocalProvider, *entries: Any) -> str:
    """The layer of an uploaded archive."""
    files = provider.store.files
    with files.new_layer() as made:
        (made / "archive").write_bytes(tar(entries))
        return store_archive(files, made, made / "archive", LIMITS)


async def build(builder: ImageBuilder, *steps: BuildStep, base: str = "host", **fields: Any) -> StoredImage:
    return await builder.build(Recipe(base=base, steps=steps, **fields))


async def run_in(provider: LocalProvider, image: str, command: str, user: str = "root") -> str:
    """Standard output of a command in a new sandbox of an image."""
    ref = await provider.create(SandboxSpec(image=image))
    sandbox = await provider.attach(ref)
    try:
        result = await sandbox.exec(command, user=user, timeout_s=20)
        assert result.exit_code == 0, result
        return result.stdout.decode()
    finally:
        await sandbox.kill()


async def test_steps_shape_the_image(provider: LocalProvider, builder: ImageBuilder) -> None:
    context = context_of(provider, folder("sub"), file("sub/deep", b"deep"), file("run.sh", b"x", mode=0o755))
    image = await build(
        builder,
        step("ENV", "A", "one", "B", "$A-two:${A}"),
        step("ENV", "C", "$B:$PATH"),
        step("WORKDIR", "/app"),
        step("COPY", "sub", "copied", context=context),
        step("COPY", "*.sh", "/opt/tools/", "agent", "0700", context=context),
        step("RUN", 'echo "$C" > c; id -un > who'),
        step("USER", "agent"),
        step("WORKDIR", "work"),
        step("RUN", "id -un > who"),
        step("RUN", "id -un > /tmp/asked", "root"),
    )
    assert (image.folder, image.user, image.shows_host) == ("/app/work", "agent", True)
    assert image.environment["B"] == "-two:"
    said = await run_in(provider, image.reference, "cat /app/c /app/who who /tmp/asked /app/copied/deep; pwd")
    search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert said == f"-two::{search}\nroot\nagent\nroot\ndeep/app/work\n"
    listed = await run_in(provider, image.reference, "stat -c '%U %a' /opt/tools/run.sh /app/work")
    assert listed == "agent 700\nagent 755\n"


async def test_layers_hide_what_later_steps_remove(provider: LocalProvider, builder: ImageBuilder) -> None:
    image = await build(
        builder,
        step("RUN", "mkdir -p /opt/kept /opt/gone /opt/new && touch /opt/kept/a /opt/kept/b /opt/gone/c /opt/new/d"),
        step(
            "RUN", "rm -r /opt/kept/a /opt/gone; rm -r /opt/new; mkdir /opt/new; touch /opt/new/e; mv /opt/kept /opt/k"
        ),
        step(
            "RUN", "ln /opt/new/e /opt/hard; ln -s hard /opt/soft; chmod 4755 /opt/new/e; setfattr -h 2>/dev/null; true"
        ),
    )
    assert await run_in(provider, image.reference, "cd /opt; find . | sort; stat -c %h,%a new/e") == (
        ".\n./hard\n./k\n./k/b\n./new\n./new/e\n./soft\n2,4755\n"
    )
    assert image.made_layers == 4


async def test_equal_steps_are_made_once(provider: LocalProvider, builder: ImageBuilder) -> None:
    first = await build(builder, step("RUN", "echo one > /one"), step("RUN", "echo two > /two"))
    again = await build(builder, step("RUN", "echo one > /one"), step("RUN", "echo two > /two"))
    other = await build(builder, step("RUN", "echo one > /one"), step("RUN", "echo three > /two"))
    forced = await build(builder, step("RUN", "echo one > /one"), step("RUN", "echo two > /two"), force=True)
    counts = [(image.made_layers, image.cached_layers) for image in (first, again, other, forced)]
    assert counts == [(3, 0), (0, 3), (1, 2), (3, 0)]
    assert first.reference == again.reference
    assert first.layers[1:] == other.layers[1:]


async def test_the_cache_tells_contents_environments_and_networks_apart(
    provider: LocalProvider, builder: ImageBuilder
) -> None:
    one, two = (context_of(provider, file("a", data)) for data in (b"1", b"2"))
    made = [
        (await build(builder, *steps)).made_layers
        for steps in (
            (step("COPY", "a", "/a", context=one),),
            (step("COPY", "a", "/a", context=two),),
            (step("COPY", "a", "/a", context=one),),
            (step("RUN", "env > /a"),),
            (step("ENV", "X", "1"), step("RUN", "env > /a")),
        )
    ]
    assert made == [2, 1, 0, 1, 1]
    networked = ImageBuilder(provider, network=Network.HOST)
    assert (await build(networked, step("RUN", "env > /a"))).made_layers == 1


async def test_a_build_begins_with_an_archive_or_a_named_image(
    provider: LocalProvider, builder: ImageBuilder, tmp_path: Path
) -> None:
    archive = tmp_path / "base.tar"
    archive.write_bytes(tar(base_entries()))
    image = await build(builder, step("RUN", "echo made > /made"), base=str(archive))
    assert not image.shows_host
    assert await run_in(provider, image.reference, "cat /made /etc/release") == "made\nbase\n"
    catalog = ImageCatalog(provider.store.files)
    catalog.put(StoredImage(name="made", source=str(archive), digest=image.digest, layers=image.layers))
    above = await build(builder, step("RUN", "echo above > /above"), base="image:made")
    assert await run_in(provider, above.reference, "cat /made /above") == "made\nabove\n"
    # Layers of named images stay, and what nobody names or uses goes.
    for held in await provider.images():
        assert await provider.drop_image(held)
    provider.store.files.evict(0)
    assert await run_in(provider, "image:made", "cat /made") == "made\n"
    with pytest.raises(ImageUnknown):
        await provider.store.resolve(above.reference)
    assert catalog.remove("made")
    with pytest.raises(ImageUnknown):
        await build(builder, base="image:made")


async def test_the_cache_keeps_to_the_size_of_the_store(tmp_path: Path) -> None:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images", image_bytes=6 << 20)) as provider:
        builder = ImageBuilder(provider)
        await builder.prepare()
        for number in range(6):
            await build(builder, step("RUN", f"head -c 2M /dev/zero > /tmp/{number}"))
            assert builder.files.size_bytes() <= 6 << 20
        # The newest is still there.
        assert (await build(builder, step("RUN", "head -c 2M /dev/zero > /tmp/5"))).made_layers == 0


async def test_a_dockerfile_and_its_folder_make_an_image(
    provider: LocalProvider, builder: ImageBuilder, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    (context / "data").mkdir(parents=True)
    (context / "data" / "file").write_text("content\n")
    (context / "link").symlink_to("/etc/hostname")
    text = "FROM host\nARG WHO=me\nWORKDIR /w\nCOPY data link /d/\nRUN <<EOF\necho $WHO > who\nEOF\nCMD sleep 9\n"
    parsed = parse(text, {"WHO": "you"})
    steps = [
        BuildStep(
            kind=one.kind,
            arguments=one.arguments,
            context=store_files(provider.store.files, context, one.arguments[0], LIMITS),
        )
        if one.kind is StepKind.COPY
        else one
        for one in parsed.steps
    ]
    image = await build(builder, *steps)
    assert parsed.start_command == "sleep 9"
    assert (
        await run_in(provider, image.reference, "cat who /d/file; readlink /d/link") == "you\ncontent\n/etc/hostname\n"
    )
    with pytest.raises(ImageRefused, match="leads out"):
        store_files(provider.store.files, context, "../secret", LIMITS)
    (context / "out").symlink_to(tmp_path)
    (tmp_path / "secret").write_text("x")
    with pytest.raises(ImageRefused, match="leads out"):
        store_files(provider.store.files, context, "out/secret", LIMITS)


@pytest.mark.parametrize(
    ("steps", "at", "said"),
    [
        ((step("RUN", "true"), step("RUN", "echo oops >&2; exit 3")), "2", "exit code 3\noops"),
        ((step("USER", "nobody-here"), step("RUN", "true")), "1", "nobody-here"),
        ((step("COPY", "a", "/a"),), "1", "upload them again"),
        ((step("ENV", "A=B", "1"),), "1", "not the name of a variable"),
        ((step("RUN", ""),), "1", "empty"),
        ((step("WORKDIR", "/etc/passwd/x"),), "1", "WORKDIR"),
    ],
)
async def test_a_failing_step_is_named(builder: ImageBuilder, steps: tuple[BuildStep, ...], at: str, said: str) -> None:
    with pytest.raises(BuildRefused) as raised:
        await build(builder, *steps)
    assert raised.value.step == at
    assert said in raised.value.message


async def test_a_failed_build_leaves_no_sandbox_and_no_lease(provider: LocalProvider, builder: ImageBuilder) -> None:
    with pytest.raises(BuildRefused):
        await build(builder, step("RUN", "true"), step("RUN", "exit 1"))
    assert await provider.list() == []
    assert ImageCatalog(provider.store.files).all() == []
    home = provider.store.files.home
    assert list((home / "unpacking").iterdir()) == []
    await build(builder, step("RUN", "true"))
    held = [path for path in (home / "leases").iterdir() if not path.name.startswith(f"{provider.launcher_pid}-")]
    assert held == []


async def test_sandboxes_of_a_lost_build_are_ended(provider: LocalProvider, builder: ImageBuilder) -> None:
    labels = {"purpose": "build"}
    await provider.create(SandboxSpec(labels=labels, idempotency_key="build-0123456789abcdef"))
    others = await provider.create(SandboxSpec(labels=labels, idempotency_key="mine"))
    await builder.prepare()
    assert [info.id for info in await provider.list()] == [others.id]


async def test_start_and_ready_commands_are_tried(builder: ImageBuilder, provider: LocalProvider) -> None:
    started = {"start_command": "sleep 0.3; touch /tmp/up; sleep 60", "ready_command": "test -e /tmp/up"}
    image = await build(builder, **started)
    assert "/tmp/up" not in await run_in(provider, image.reference, "ls -d /tmp/*  || true")
    impatient = ImageBuilder(provider, limits=BuildLimits(ready_s=0.5))
    with pytest.raises(BuildRefused, match="ready command did not succeed") as raised:
        await build(impatient, start_command="true", ready_command="false")
    assert raised.value.step == "finalize"


# Hostile builds


@pytest.mark.parametrize(
    "entries",
    [
        (file("../../out", b"x"),),
        (file("/out", b"x"),),
        (hard_link("a", "../../../etc/passwd"),),
    ],
    ids=["parent", "absolute", "hard link out"],
)
async def test_members_of_an_archive_cannot_leave_it(
    provider: LocalProvider, tmp_path: Path, entries: tuple[Any, ...]
) -> None:
    with pytest.raises(ImageRefused):
        context_of(provider, *entries)
    assert named_out(tmp_path) == []
    assert list((tmp_path / "images" / "layers").iterdir()) == []


@pytest.mark.parametrize("target", ["/", "..", "../../../.."])
async def test_members_below_a_link_stay_in_the_archive(provider: LocalProvider, tmp_path: Path, target: str) -> None:
    layer = provider.store.files.tree(context_of(provider, link("a", target), file("a/out", b"x")))
    assert named_out(tmp_path) == [layer / ".headrace-context" / "out"]


def named_out(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("out") if not path.is_symlink()]


async def test_links_of_an_archive_lead_only_into_the_sandbox(provider: LocalProvider, builder: ImageBuilder) -> None:
    device = entry("device", type=tarfile.CHRTYPE, devmajor=1, devminor=8)
    context = context_of(
        provider, link("shadow", "/etc/shadow"), link("up", "../../../../etc"), device, file("f", b"f")
    )
    image = await build(builder, step("COPY", ".", "/c", context=context))
    assert await run_in(provider, image.reference, "ls /c; readlink /c/shadow /c/up") == (
        "f\nshadow\nup\n/etc/shadow\n../../../../etc\n"
    )
    for source in ("../f", "/f", "a/../../f"):
        with pytest.raises(BuildRefused, match="leads out"):
            await build(builder, step("COPY", source, "/c", context=context))


@contextmanager
def listener() -> Iterator[int]:
    """A service on this host's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"hello\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


async def test_run_has_no_network_unless_the_operator_gives_it(provider: LocalProvider, builder: ImageBuilder) -> None:
    with listener() as port:
        reach = step("RUN", f"head -n 1 < /dev/tcp/127.0.0.1/{port} > /said")
        with pytest.raises(BuildRefused, match="refused"):
            await build(builder, reach)
        with pytest.raises(BuildRefused, match="unreachable"):
            await build(builder, step("RUN", "echo > /dev/tcp/169.254.169.254/80"))
        image = await build(ImageBuilder(provider, network=Network.HOST), reach)
    assert await run_in(provider, image.reference, "cat /said; cat /etc/resolv.conf | wc -c") == "hello\n0\n"
    # The sandboxes of the image have none.
    assert await run_in(provider, image.reference, "wc -l < /proc/net/dev") == "3\n"


async def test_a_sandbox_gets_the_hosts_network_only_if_the_provider_allows_it(tmp_path: Path) -> None:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        with pytest.raises(SpecRefused, match="network"):
            await provider.create(SandboxSpec(network=Network.HOST))


async def test_a_step_that_fills_the_disk_ends(provider: LocalProvider) -> None:
    small = ImageBuilder(provider, limits=BuildLimits(layer_bytes=8 << 20, entries=200))
    with pytest.raises(BuildRefused, match="No space left"):
        await build(small, step("RUN", "head -c 100M /dev/zero > /big"))
    with pytest.raises(BuildRefused, match="more than a layer may hold"):
        await build(small, step("RUN", "for i in {1..300}; do : > /tmp/$i; done"))
    assert await provider.list() == []


async def test_a_step_that_prints_without_end_or_hangs_ends(provider: LocalProvider) -> None:
    lines = 0

    def log(_level: str, line: str, _step: str) -> None:
        nonlocal lines
        lines += 1
        assert len(line) <= 2000

    short = ImageBuilder(provider, limits=BuildLimits(total_s=3.0))
    recipe = Recipe(base="host", steps=(step("RUN", "head -c 20M /dev/zero; sleep 100"),))
    with pytest.raises(BuildRefused, match="longer than 3 s"):
        await short.build(recipe, log=log)
    assert await provider.list() == []


async def test_a_layer_holds_no_devices_sockets_or_capabilities(provider: LocalProvider, builder: ImageBuilder) -> None:
    make = (
        "mkdir /h; mkfifo /h/fifo; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/h/socket\")'; "
        "mknod /h/null c 1 3 2>/dev/null; cp /bin/true /h/setuid; chmod 6755 /h/setuid; "
        'python3 -c \'import os; os.setxattr("/h/setuid", "user.overlay.opaque", b"y"); '
        'os.setxattr("/h/setuid", "user.kept", b"1")\' || true; chown 1234:4321 /h'
    )
    image = await build(builder, step("RUN", make))
    tree = provider.store.files.tree(image.layers[0])
    found = {path.name: path for path in (tree / "h").iterdir()}
    assert sorted(found) == ["setuid"]
    assert stat.S_IMODE(found["setuid"].stat().st_mode) == 0o6755
    status = (tree / "h").stat()
    assert (status.st_uid, status.st_gid) == (1234, 4321)
    names = os.listxattr(found["setuid"])
    assert not [name for name in names if name.startswith(("security.", "trusted.", "user.overlay."))], names


async def test_paths_too_deep_for_a_layer_are_refused(builder: ImageBuilder) -> None:
    deep = "for i in {1..300}; do mkdir 0123456789abcdef && cd 0123456789abcdef; done; pwd | wc -c"
    with pytest.raises(BuildRefused, match="too deep"):
        await build(builder, step("RUN", deep))


async def test_an_archive_is_bounded(provider: LocalProvider, tmp_path: Path) -> None:
    files = provider.store.files
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        info = tarfile.TarInfo("zeros")
        info.size = 32 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(ImageRefused, match="bytes"), files.new_layer() as made:
        (made / "archive").write_bytes(data.getvalue())
        store_archive(files, made, made / "archive", UnpackLimits(1 << 20))
    assert list((files.home / "layers").iterdir()) == []
