"""Files that must outlive a power cut: written, fsynced, then renamed; and what an empty one leads to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.actors.engines.journal import PushJournal
from headrace.actors.engines.members_file import Roster, read_roster
from headrace.actors.engines.requests import EngineRequest, RequestBox
from headrace.actors.runtime.pools.gateway import read_address
from headrace.buffer.primitives.durable_files import (
    append_line,
    create_file,
    publish_folder,
    replace_file,
    write_private,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.processes.server_process import announce
from support.full_disks import files_of_at_most

SNAPSHOT = WeightsSnapshot(version=PolicyVersion(1, 4), shards=())


def published_tree(folder: Path) -> None:
    (folder / "staged" / "inner").mkdir(parents=True)
    (folder / "staged" / "inner" / "data").write_bytes(b"data")
    publish_folder(folder / "staged", folder / "final")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Each fsync with the name of what was fsynced, and each rename with both names, in their order."""
    seen: list[tuple[str, str]] = []
    real_fsync, real_replace, real_rename = os.fsync, os.replace, os.rename

    def fsync(descriptor: int) -> None:
        seen.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        seen.append(("rename", f"{Path(source).name} {Path(target).name}"))
        real_replace(source, target)

    def rename(source: Path, target: Path) -> None:
        seen.append(("rename", f"{Path(source).name} {Path(target).name}"))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rename", rename)
    return seen


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: replace_file(folder / "file", b"data"),
        lambda folder: write_private(folder / "file", b"data"),
        lambda folder: PushJournal(folder).write_newest(SNAPSHOT),
        lambda folder: Roster().write(folder / "members.json"),
        lambda folder: announce(folder / "server.json", "http://127.0.0.1:1"),
        lambda folder: RequestBox(folder).answer(
            EngineRequest(request_id="000001-a", kind="add", what="http://h:1"), engine_id="one"
        ),
        published_tree,
    ],
    ids=["replace", "private", "newest snapshot", "roster", "announcement", "answer", "folder"],
)
def test_data_is_on_disk_before_its_name(
    tmp_path: Path, disk: list[tuple[str, str]], write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    [renamed] = [place for place, (what, _) in enumerate(disk) if what == "rename"]
    source, _ = disk[renamed][1].split()
    assert ("fsync", source) in disk[:renamed]
    assert ("fsync", tmp_path.name) in disk[renamed:], "the rename itself is durable too"


def test_a_whole_tree_is_fsynced(tmp_path: Path, disk: list[tuple[str, str]]) -> None:
    published_tree(tmp_path)
    assert {("fsync", name) for name in ("data", "inner", "staged")} <= set(disk)


def test_a_private_file_is_readable_by_its_owner_only_even_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "token.partial").write_text("left by a crash")
    (tmp_path / "token.partial").chmod(0o666)
    write_private(tmp_path / "token", b"secret")
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert (tmp_path / "token").read_bytes() == b"secret"


def test_a_created_file_is_complete_or_absent(tmp_path: Path, disk: list[tuple[str, str]]) -> None:
    path = tmp_path / "file"
    with files_of_at_most(3), pytest.raises(OSError, match="File too large"):
        create_file(path, b"data")
    assert list(tmp_path.iterdir()) == []
    create_file(path, b"data")
    assert path.read_bytes() == b"data"
    assert disk[-1] == ("fsync", tmp_path.name), "the name itself is durable too"
    assert disk[-2][1].startswith("file."), "the content is, before it"
    with pytest.raises(FileExistsError):
        create_file(path, b"other")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"data"


def test_a_line_that_a_full_disk_tore_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert append_line(path, b"one\n") == 4
    with files_of_at_most(6), pytest.raises(OSError, match="No space left"):
        append_line(path, b"two\n")
    append_line(path, b"three\n")
    assert path.read_bytes() == b"one\ntw\nthree\n"


@pytest.mark.parametrize("left", [b"", b"\0\0\0\0", b"[]", b'{"version": '], ids=["empty", "zeros", "list", "torn"])
def test_an_empty_or_torn_file_is_rewritten(tmp_path: Path, left: bytes) -> None:
    for name in ("newest.json", "members.json", "gateway.json"):
        (tmp_path / name).write_bytes(left)
    (tmp_path / "pushes.jsonl").write_bytes(left)
    journal = PushJournal(tmp_path)
    assert journal.newest() is None
    assert journal.broken() is None
    assert read_roster(tmp_path / "members.json") == Roster()
    assert read_address(tmp_path / "gateway.json") is None
    journal.write_newest(SNAPSHOT)
    assert journal.newest() == SNAPSHOT


def test_requests_are_answered_in_the_order_they_were_made_whatever_the_clock_says(tmp_path: Path) -> None:
    for number, age_s in ((1, 0), (2, 50), (3, 10_000)):
        name = f"{number:06d}-x"
        write_private(tmp_path / f"{name}.json", b'{"request_id": "%s", "kind": "add", "what": "u"}' % name.encode())
        now_s = (tmp_path / f"{name}.json").stat().st_mtime
        os.utime(tmp_path / f"{name}.json", (now_s - age_s, now_s - age_s))
    assert [request.request_id for request in RequestBox(tmp_path).open()] == ["000001-x", "000002-x", "000003-x"]
