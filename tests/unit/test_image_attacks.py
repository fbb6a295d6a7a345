"""Hostile layer archives: each is ImageRefused or stays inside the layer, and nothing is written outside of it."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.sandboxes.errors import ImageRefused
from headrace.sandboxes.images.folders import remove
from headrace.sandboxes.images.layers import UnpackLimits, unpack
from headrace.sandboxes.images.streams import FileRange, TarStream
from support import image_kit as kit

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away and makes whiteouts")


def unpack_bytes(
    data: bytes, target: Path, *, max_bytes: int = 1 << 24, entries: int = 1000, whiteouts: bool = True
) -> Path:
    """Unpack into target/tree; the file beside it is a witness that must not change."""
    tree = target / "tree"
    tree.mkdir()
    (target / "witness").mkdir()
    (target / "witness/file").write_text("untouched")
    archive = target / "archive"
    archive.write_bytes(data)
    try:
        with archive.open("rb") as file:
            stream = TarStream(file, FileRange(str(archive)), max_bytes)
            unpack(stream, str(tree), UnpackLimits(max_bytes, entries), whiteouts=whiteouts)
    finally:
        assert sorted(path.name for path in target.iterdir()) == ["archive", "tree", "witness"]
        assert [path.name for path in (target / "witness").iterdir()] == ["file"]
        assert (target / "witness/file").read_text() == "untouched"
    return tree


def refused(data: bytes, target: Path, match: str, **limits: int) -> None:
    with pytest.raises(ImageRefused, match=match):
        unpack_bytes(data, target, **limits)


@pytest.mark.parametrize("name", ["../witness/planted", "a/../../witness/planted", "/tmp/planted", "..", "a/.."])
def test_names_that_escape_the_layer_are_refused(name: str, tmp_path: Path) -> None:
    refused(kit.tar([kit.file(name, b"x")]), tmp_path, "unsafe archive")


def test_the_attacks_modify_the_witness_file_with_a_naive_unpacker(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "witness").mkdir()
    entries = [kit.link("out", "../witness"), kit.file("out/planted", b"x"), kit.file("../witness/dots", b"x")]
    with tarfile.open(fileobj=io.BytesIO(kit.tar(entries))) as archive:
        archive.extractall(tmp_path / "tree", filter="fully_trusted")
    assert sorted(path.name for path in (tmp_path / "witness").iterdir()) == ["dots", "planted"]


def test_a_folder_entry_with_dots_is_refused(tmp_path: Path) -> None:
    refused(kit.tar([kit.folder("../witness/planted")]), tmp_path, "unsafe archive")


@pytest.mark.parametrize("target", ["../witness", "/witness", "../../../../../../witness"])
def test_a_write_through_a_link_stays_inside(target: str, tmp_path: Path) -> None:
    """The link leads to /witness of the layer, which does not exist."""
    entries = [kit.link("out", target), kit.file("out/planted", b"x")]
    refused(kit.tar(entries), tmp_path, "damaged archive")


def test_a_write_through_an_absolute_link_to_the_host_lands_in_the_layer(tmp_path: Path) -> None:
    entries = [kit.folder(f"{tmp_path}/witness".lstrip("/")), kit.link("out", f"{tmp_path}/witness")]
    tree = unpack_bytes(kit.tar([*entries, kit.file("out/planted", b"x")]), tmp_path)
    assert (tree / str(tmp_path).lstrip("/") / "witness/planted").read_bytes() == b"x"


def test_a_file_replaces_a_link_of_the_same_name(tmp_path: Path) -> None:
    entries = [kit.link("file", f"{tmp_path}/witness/file"), kit.file("file", b"x")]
    tree = unpack_bytes(kit.tar(entries), tmp_path)
    assert (tree / "file").read_bytes() == b"x"
    assert not (tree / "file").is_symlink()


def test_a_link_loop_is_refused(tmp_path: Path) -> None:
    entries = [kit.link("a", "b"), kit.link("b", "a"), kit.file("a/x", b"x")]
    refused(kit.tar(entries), tmp_path, "unsafe archive")


def test_links_into_proc_are_not_followed(tmp_path: Path) -> None:
    entries = [kit.link("out", "/proc/self/root"), kit.file(f"out{tmp_path}/witness/planted", b"x")]
    refused(kit.tar(entries), tmp_path, "damaged archive")


@pytest.mark.parametrize("target", ["../witness/file", "/etc/passwd", "missing", ""])
def test_hard_links_cannot_escape_the_layer(target: str, tmp_path: Path) -> None:
    refused(kit.tar([kit.hard_link("planted", target)]), tmp_path, "archive")


def test_a_hard_link_through_a_link_stays_inside(tmp_path: Path) -> None:
    entries = [kit.link("out", "../witness"), kit.hard_link("planted", "out/file")]
    refused(kit.tar(entries), tmp_path, "damaged archive")


def test_a_hard_link_to_a_link_does_not_follow_it(tmp_path: Path) -> None:
    entries = [kit.link("out", f"{tmp_path}/witness/file"), kit.hard_link("planted", "out")]
    tree = unpack_bytes(kit.tar([*entries, kit.file("planted", b"x")]), tmp_path)
    assert (tree / "out").is_symlink()
    assert (tree / "planted").read_bytes() == b"x"


@pytest.mark.parametrize("name", [".wh...", ".wh..", ".wh."])
def test_a_whiteout_with_an_invalid_name_is_refused(name: str, tmp_path: Path) -> None:
    refused(kit.tar([kit.file(f"a/{name}")]), tmp_path, "unsafe archive")


def test_a_whiteout_below_a_link_stays_inside(tmp_path: Path) -> None:
    refused(kit.tar([kit.link("out", "../witness"), kit.file("out/.wh.file")]), tmp_path, "damaged archive")
    remove(tmp_path / "tree")


def test_devices_and_fifos_are_dropped(tmp_path: Path) -> None:
    kinds = {"disk": tarfile.BLKTYPE, "memory": tarfile.CHRTYPE, "pipe": tarfile.FIFOTYPE}
    entries = [kit.entry(name, type=kind, devmajor=1, devminor=1) for name, kind in kinds.items()]
    # A 0/0 device would be an undeclared whiteout.
    entries.append(kit.entry("hides", type=tarfile.CHRTYPE, devmajor=0, devminor=0))
    tree = unpack_bytes(kit.tar([*entries, kit.file("last", b"x")]), tmp_path)
    assert [path.name for path in tree.iterdir()] == ["last"]


def test_attributes_interpreted_by_the_kernel_or_overlayfs_are_dropped(tmp_path: Path) -> None:
    names = ["security.capability", "trusted.overlay.redirect", "user.overlay.redirect", "user.kept"]
    headers = {f"SCHILY.xattr.{name}": "value" for name in names}
    tree = unpack_bytes(kit.tar([kit.file("f", b"x", pax_headers=headers)]), tmp_path)
    assert os.listxattr(tree / "f") == ["user.kept"]
    assert os.getxattr(tree / "f", "user.kept") == b"value"


def test_a_bomb_of_zeros_is_refused_before_it_is_written(tmp_path: Path) -> None:
    bomb = gzip.compress(kit.tar([kit.file("zeros", bytes(8 << 20))]))
    assert len(bomb) < 16_000
    refused(bomb, tmp_path, "max_bytes", max_bytes=1 << 20)
    assert not (tmp_path / "tree/zeros").exists()


def test_a_falsely_declared_size_is_refused(tmp_path: Path) -> None:
    info, _ = kit.file("huge", b"x")
    info.size = 1 << 50
    refused(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048), tmp_path, "max_bytes")


def test_a_negative_size_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("back")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfc\x00"
    checksum = sum(header[:148]) + 256 + sum(header[156:])
    header[148:156] = f"{checksum:06o}\0 ".encode()
    refused(bytes(header) + bytes(2048), tmp_path, r"archive|max_bytes")


def test_a_sparse_bomb_is_refused(tmp_path: Path) -> None:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 45)}
    data = b"1\n0\n0\n".ljust(512, b"\0")
    refused(kit.tar([kit.file("sparse", data, pax_headers=headers)]), tmp_path, "max_bytes")


def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    refused(kit.tar([kit.file(f"f{number}") for number in range(50)]), tmp_path, "50|entries", entries=49)


def test_a_header_of_many_megabytes_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("headers")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    refused(info.tobuf() + bytes(4096), tmp_path, "header")


def test_nested_headers_are_refused(tmp_path: Path) -> None:
    """Each extended header reads the next one by recursion."""
    info = tarfile.TarInfo("headers")
    info.type, info.size = tarfile.XHDTYPE, 512
    piece = info.tobuf() + b"12 comment=x\n".ljust(512, b"\0")
    refused(piece * 5000 + kit.tar([kit.file("f")]), tmp_path, "archive", max_bytes=1 << 26)


@pytest.mark.parametrize("cut", [1, 700, 1024, 1500, 2048])
def test_a_truncated_archive_is_refused(cut: int, tmp_path: Path) -> None:
    whole = kit.tar([kit.file("one", b"1" * 600), kit.file("two", b"2")])[:4096]
    refused(whole[:cut], tmp_path, "archive")


@pytest.mark.parametrize("kind", ["gzip", "xz", "zstd"])
def test_damaged_compression_is_refused(kind: str, tmp_path: Path) -> None:
    data = bytearray(kit.compress(kind, kit.tar([kit.file("f", os.urandom(20_000))])))
    del data[len(data) // 2 : len(data) // 2 + 4000]
    refused(bytes(data), tmp_path, "archive")


def test_names_longer_than_the_kernel_allows_are_refused(tmp_path: Path) -> None:
    refused(kit.tar([kit.file("n" * 300, b"x")]), tmp_path, "archive")
    remove(tmp_path / "tree")
    remove(tmp_path / "witness")
    remove(tmp_path / "archive")
    refused(kit.tar([kit.file("/".join(["d"] * 3000), b"x")]), tmp_path, "archive")


def test_a_tree_deeper_than_the_path_length_limit_can_be_removed(tmp_path: Path) -> None:
    # Few links, because the kernel counts those of a restarted look-up twice and allows 40.
    piece = "/".join(["d"] * 100)
    entries = []
    for number in range(13):
        entries.append(kit.folder(f"l{number}/{piece}" if number else piece))
        entries.append(kit.link(f"l{number + 1}", f"l{number}/{piece}" if number else piece))
    try:
        unpack_bytes(kit.tar(entries), tmp_path)
    finally:
        # Removed in any case, because pytest could not do it.
        remove(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_layers_preserve_owners_modes_times_and_attributes(tmp_path: Path) -> None:
    entries = [
        kit.folder("d", mode=0o1770, uid=5, gid=6, mtime=1000),
        kit.file("d/setid", b"x" * 5000, mode=0o6755, uid=7, gid=8, mtime=2000),
        kit.hard_link("d/again", "./d/setid"),
        kit.link("d/link", "/anywhere"),
        kit.file("implied/parent/f", b"y"),
        kit.file("na\udcffme", b"z"),
    ]
    tree = unpack_bytes(kit.tar(entries), tmp_path)
    folder, file = (tree / "d").stat(), (tree / "d/setid").stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid, folder.st_gid, folder.st_mtime) == (0o1770, 5, 6, 1000)
    assert (stat.S_IMODE(file.st_mode), file.st_uid, file.st_gid, file.st_mtime) == (0o6755, 7, 8, 2000)
    assert file.st_nlink == 2
    assert (tree / "d/again").samefile(tree / "d/setid")
    assert (tree / "d/link").readlink().as_posix() == "/anywhere"
    assert (tree / "na\udcffme").exists()


def is_whiteout(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(path: Path) -> bool:
    return "trusted.overlay.opaque" in os.listxattr(path)


def test_whiteouts_are_converted_to_overlayfs_whiteouts(tmp_path: Path) -> None:
    entries = [
        kit.file("a/.wh.gone"),
        kit.file("b/.wh..wh..opq"),
        kit.file("c/.wh..wh.plnk"),
        # The order within a layer is irrelevant: its own entries remain, lower layers are hidden.
        kit.file("d/.wh.both"),
        kit.folder("d/both"),
        kit.folder("e/both"),
        kit.file("e/.wh.both"),
        kit.file("f/.wh.file"),
        kit.file("f/file", b"new"),
        kit.file("g/file", b"new"),
        kit.file("g/.wh.file"),
        kit.file("h/.wh.deep"),
        kit.file("h/deep/file", b"new"),
    ]
    tree = unpack_bytes(kit.tar(entries), tmp_path)
    assert is_whiteout(tree / "a/gone")
    assert is_opaque(tree / "b")
    assert [is_opaque(tree / name) for name in ("d/both", "e/both", "h/deep")] == [True] * 3
    assert [(tree / name).read_bytes() for name in ("f/file", "g/file", "h/deep/file")] == [b"new"] * 3
    assert not any(path.name.startswith(".wh.") for path in tree.rglob("*"))


def test_whiteout_names_are_plain_names_in_a_root_file_system_tar(tmp_path: Path) -> None:
    tree = unpack_bytes(kit.tar([kit.file("a/.wh.name", b"x")]), tmp_path, whiteouts=False)
    assert (tree / "a/.wh.name").read_bytes() == b"x"


NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "l", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4)
TARGETS = st.sampled_from(["..", "../..", "/", "a", "/a/b", "../witness", "b/../..", "l", "/proc/self/root"])
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(st.tuples(NAMES, KINDS, TARGETS), max_size=8))
def test_no_sequence_of_entries_escapes_the_tree(
    plan: Iterable[tuple[list[str], bytes, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("plan")
    entries = [kit.entry("/".join(name), type=kind, linkname=link, mode=0o777) for name, kind, link in plan]
    try:
        tree = unpack_bytes(kit.tar(entries), target)
    except ImageRefused:
        tree = target / "tree"
    for folder, _, _ in os.walk(tree):
        assert os.path.realpath(folder).startswith(str(tree))
    remove(target)


def test_an_xz_file_with_several_streams_is_read_completely(tmp_path: Path) -> None:
    data = kit.tar([kit.file("f", b"x" * 100_000)])
    pieces = kit.compress("xz", data[:50_000]) + bytes(8) + kit.compress("xz", data[50_000:])
    assert (unpack_bytes(pieces, tmp_path) / "f").stat().st_size == 100_000


def test_compressed_and_uncompressed_digests_cover_every_byte(tmp_path: Path) -> None:
    plain = kit.tar([kit.file("f", b"x")]) + b"\0" * 5000
    packed = gzip.compress(plain) + gzip.compress(b"\0" * 600)
    (tmp_path / "archive").write_bytes(b"before" + packed + b"after")
    (tmp_path / "tree").mkdir()
    with (tmp_path / "archive").open("rb") as file:
        stream = TarStream(file, FileRange("", 6, len(packed)), 1 << 20)
        unpack(stream, str(tmp_path / "tree"), UnpackLimits(1 << 20), whiteouts=True)
        digests = stream.finish()
    expected = (kit.sha256(packed), kit.sha256(plain + bytes(600)))
    assert tuple(f"sha256:{digest}" for digest in digests) == expected
