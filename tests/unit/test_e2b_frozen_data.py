"""Archives of frozen data from hostile E2B sandboxes."""

from __future__ import annotations

import base64
import io
import tarfile

import pytest

from headrace.sandboxes.e2b.frozen_data import filtered
from headrace.sandboxes.errors import FrozenPathRefused


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = "", mode: int = 0o644):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, len(data), link, mode
    return info, data


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return base64.b64encode(output.getvalue())


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return {member.name: member for member in tar}


def test_only_folders_files_and_links_below_the_path_are_extracted() -> None:
    given = archive(
        entry("data", tarfile.DIRTYPE, mode=0o777),
        entry("data/file", data=b"text", mode=0o4777),
        entry("data/link", tarfile.SYMTYPE, link="/etc"),
        entry("data/link/passwd", data=b"root::0:0"),
        entry("data/../etc/shadow", data=b"x"),
        entry("data/..", tarfile.DIRTYPE),
        entry("data/device", tarfile.CHRTYPE),
        entry("data/pipe", tarfile.FIFOTYPE),
        entry("data/hard", tarfile.LNKTYPE, link="/etc/passwd"),
        entry("data/absent/file", data=b"x"),
        entry("/etc/passwd", data=b"x"),
    )
    taken = members(filtered(given, "/frozen/data", max_bytes=1000))
    assert set(taken) == {"frozen/data", "frozen/data/file", "frozen/data/link"}
    assert {name: (member.mode, member.uid) for name, member in taken.items() if not member.issym()} == {
        "frozen/data": (0o555, 0),
        "frozen/data/file": (0o555, 0),
    }


def test_a_single_file_is_given_the_targets_name() -> None:
    assert set(members(filtered(archive(entry("result", data=b"1")), "/frozen/answer", max_bytes=10))) == {
        "frozen/answer"
    }


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"no base64!", "not a valid archive"),
        (base64.b64encode(b"no tar" * 200), "not a valid archive"),
        (archive(entry("data", tarfile.DIRTYPE), entry("data/file", data=b"x" * 90))[:1400], "not a valid archive"),
        (archive(entry("data", data=b"x" * 101)), "more than 100 bytes"),
    ],
    ids=["no base64", "no tar", "cut", "large"],
)
def test_a_damaged_or_oversized_archive_is_refused(given: bytes, reason: str) -> None:
    with pytest.raises(FrozenPathRefused, match=reason):
        filtered(given, "/frozen", max_bytes=100)


def test_a_truncated_frozen_archive_is_refused() -> None:
    with pytest.raises(FrozenPathRefused, match="more than 5 bytes"):
        filtered(archive(entry("data", data=b"x")), "/frozen", max_bytes=5, truncated=True)
