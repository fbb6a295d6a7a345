"""Copies of a node's files: every line once, over rotation, compression, torn answers and kills of either side."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import orjson
import pytest

from headrace.actors.record.copies.copies import RECEIVED, NodeCopies
from headrace.actors.record.copies.pages import (
    NodePage,
    Piece,
    ReceivedFile,
    is_older,
    number_of,
    older_name,
    series_of,
)
from headrace.actors.record.copies.sender import next_page
from headrace.serve.tracing.retention import kept_files
from support.full_disks import files_of_at_most

PAGE = 1 << 20
GUARD_S = 60


class Source:
    """The files of a run on a node, and every line that was written to each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: dict[str, list[bytes]] = {}

    def write(self, name: str, *, size: int = 20) -> None:
        lines = self.written.setdefault(name, [])
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if name.startswith("spans/") and file.tell() == 0:
                # The same in all files of a process.
                lines.append(b'{"resource": {"service.instance.id": "%s"}}\n' % name.encode())
                file.write(lines[-1])
            lines.append(b'{"time": %d, "of": "%s", "x": "%s"}\n' % (len(lines), name.encode(), b"x" * size))
            file.write(lines[-1])

    def rotate(self, name: str) -> None:
        path = self.folder / name
        if path.exists():
            path.rename(self.folder / older_name(series_of(name), max(older(self.folder, name), default=0) + 1))

    def compress(self, name: str) -> None:
        for path in older(self.folder, name).values():
            if path.suffix != ".zst":
                staged = path.with_name(f".{path.name}.zst.staged")
                staged.write_bytes(zlib.compress(path.read_bytes()))
                staged.rename(path.with_name(f"{path.name}.zst"))
                path.unlink()

    def replace(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}")
        staged.write_bytes(content)
        staged.replace(path)


def older(folder: Path, name: str) -> dict[int, Path]:
    """Return the rotated files of a series by their numbers, in whichever form."""
    found: dict[int, Path] = {}
    for path in (folder / name).parent.glob("*.jsonl*"):
        other = f"{path.parent.name}/{path.name.removesuffix('.zst')}"
        if not path.name.startswith(".") and is_older(other) and series_of(other) == series_of(name):
            assert number_of(other) not in found, f"{path.name} is here in two forms"
            found[number_of(other)] = path
    return found


def copied(folder: Path, name: str) -> list[bytes]:
    """Return the lines in all copies of a file's series, the oldest first."""
    parts = [path.read_bytes() for _, path in sorted(older(folder, name).items())]
    parts = [part if part.startswith(b"{") else zlib.decompress(part) for part in parts]
    last = (folder / name).read_bytes() if (folder / name).exists() else b""
    return b"".join((*parts, last)).splitlines(keepends=True)


def catch_up(source: Path, copies: NodeCopies, *, limit_bytes: int = PAGE) -> None:
    while True:
        page = next_page(source, copies.held(), limit_bytes=limit_bytes)
        assert page.size <= limit_bytes
        copies.apply(page)
        if page.is_end:
            return


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "nodes" / "0123456789ab"


def test_files_have_the_same_names_and_content_and_others_are_not_copied(source: Source, here: Path) -> None:
    for name in ("logs/worker-0.jsonl", "spans/worker-7.jsonl"):
        source.write(name)
    source.replace("running/w1.json", b'{"rollouts": 1}')
    source.replace("spans/worker-7.000001.jsonl.zst", b"compressed")
    for other in ("gateway.json", "logs/.worker-0.jsonl.lock", "sessions/s.jsonl", "logs/engine.log", "running/.w1.7"):
        source.replace(other, b"a secret\n")
    (source.folder / "logs" / "folder").mkdir()
    catch_up(source.folder, NodeCopies(here))
    found = {path.relative_to(here).as_posix(): path.read_bytes() for path in here.glob("*/*")}
    assert found == {name: (source.folder / name).read_bytes() for name in found}
    assert sorted(found) == [
        "logs/worker-0.jsonl",
        "running/w1.json",
        "spans/worker-7.000001.jsonl.zst",
        "spans/worker-7.jsonl",
    ]


def test_what_is_held_is_not_sent_again_and_an_absent_folder_changes_nothing(source: Source, here: Path) -> None:
    source.write("logs/a.jsonl")
    source.replace("running/w.json", b"{}")
    copies = NodeCopies(here)
    catch_up(source.folder, copies)
    assert next_page(source.folder, copies.held(), limit_bytes=PAGE).pieces == ()
    copies.apply(next_page(source.folder / "absent", copies.held(), limit_bytes=PAGE))
    assert copied(here, "logs/a.jsonl") == source.written["logs/a.jsonl"]
    source.replace("running/w.json", b'{"new": 1}')
    catch_up(source.folder, copies)
    assert (here / "running" / "w.json").read_bytes() == b'{"new": 1}'


@pytest.mark.parametrize("seed", range(25))
def test_every_line_arrives_once_whatever_happens_in_between(source: Source, here: Path, seed: int) -> None:
    random_ = random.Random(seed)
    names = ["logs/worker-0.jsonl", "logs/worker-1.jsonl", "spans/worker-7.jsonl", "spans/gateway-8.jsonl"]
    copies, older_record = NodeCopies(here), b""
    for _ in range(300):
        name, step = random_.choice(names), random_.random()
        if step < 0.5:
            source.write(name, size=random_.randrange(200))
        elif step < 0.6:
            source.rotate(name)
        elif step < 0.65 and name.startswith("spans"):
            source.compress(name)
        elif step < 0.9:
            copies.apply(next_page(source.folder, copies.held(), limit_bytes=random_.choice((1, 50, 500, PAGE))))
        elif step < 0.96 and (here / RECEIVED).exists():
            older_record = older_record or (here / RECEIVED).read_bytes()
        else:
            _kill(here, random_, older_record)
            copies, older_record = NodeCopies(here), b""
    catch_up(source.folder, copies, limit_bytes=700)
    catch_up(source.folder, NodeCopies(here))
    for name, lines in source.written.items():
        assert copied(here, name) == lines, name
    assert (copies.losses.bytes, copies.losses.files) == (0, 0)


def _kill(here: Path, random_: random.Random, older_record: bytes) -> None:
    """Leave the disk as a kill in the middle of a write does: a copy without its last bytes, or an older record."""
    growing = [path for path in here.glob("*/*.jsonl") if path.stat().st_size]
    if growing and random_.random() < 0.5:
        path = max(growing, key=lambda each: each.stat().st_mtime_ns)
        os.truncate(path, max(0, path.stat().st_size - random_.randrange(100)))
    if older_record:
        (here / RECEIVED).write_bytes(older_record)


RECEIVER = """
import sys
from pathlib import Path
from headrace.actors.record.copies.copies import NodeCopies
from headrace.actors.record.copies.sender import next_page

copies = NodeCopies(Path(sys.argv[2]))
print("ready", flush=True)
while True:
    copies.apply(next_page(Path(sys.argv[1]), copies.held(), limit_bytes=3000))
"""


def test_a_receiver_that_is_killed_at_any_moment_repeats_and_misses_nothing(source: Source, here: Path) -> None:
    name = "logs/worker-0.jsonl"
    for _ in range(5):
        command = [sys.executable, "-c", RECEIVER, str(source.folder), str(here)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == b"ready\n"
            for number in range(400):
                source.write(name, size=500)
                if number % 50 == 25:
                    source.rotate(name)
            receiver.send_signal(signal.SIGKILL)
            receiver.wait(timeout=GUARD_S)
    catch_up(source.folder, NodeCopies(here))
    assert copied(here, name) == source.written[name]


def test_a_line_of_ten_megabytes_is_copied_and_a_torn_end_waits(source: Source, here: Path) -> None:
    source.write("logs/a.jsonl", size=10 << 20)
    path, copies = source.folder / "logs" / "a.jsonl", NodeCopies(here)
    size_bytes = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"torn')
    catch_up(source.folder, copies)
    assert (here / "logs" / "a.jsonl").read_bytes() == path.read_bytes()[:size_bytes]
    # A full disk took only a part of a span, which its writer took back.
    os.truncate(path, size_bytes)
    source.write("logs/a.jsonl")
    catch_up(source.folder, copies)
    assert copied(here, "logs/a.jsonl") == source.written["logs/a.jsonl"]


def test_files_of_a_process_that_begin_with_the_same_line_are_told_apart(source: Source, here: Path) -> None:
    name, copies = "spans/worker-1234567.jsonl", NodeCopies(here)
    for _ in range(4):
        source.write(name)
        catch_up(source.folder, copies)
        source.rotate(name)
    source.write(name)
    source.compress(name)
    source.write(name)
    source.replace("spans/worker-1234567.lost.json", b'{"queue_full":1}')
    catch_up(source.folder, copies)
    assert copied(here, name) == source.written[name]
    assert sorted(path.name for path in (here / "spans").glob("*")) == sorted(
        path.name for path in (source.folder / "spans").glob("*")
    )


def test_a_file_without_a_whole_line_waits(source: Source, here: Path) -> None:
    path = source.folder / "logs" / "a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"tor')
    copies = NodeCopies(here)
    catch_up(source.folder, copies)
    assert not (here / "logs").exists()
    path.write_bytes(b'{"torn": 1}\n')
    catch_up(source.folder, copies)
    assert copied(here, "logs/a.jsonl") == [b'{"torn": 1}\n']


def test_a_file_that_lost_its_end_cuts_its_copy_and_goes_on(source: Source, here: Path) -> None:
    for _ in range(3):
        source.write("logs/a.jsonl")
    copies = NodeCopies(here)
    catch_up(source.folder, copies)
    lines = source.written["logs/a.jsonl"]
    os.truncate(source.folder / "logs" / "a.jsonl", len(lines[0]) + 3)
    catch_up(source.folder, copies)
    assert (here / "logs" / "a.jsonl").read_bytes() == lines[0]
    with (source.folder / "logs" / "a.jsonl").open("ab") as file:
        file.write(b"\n" + lines[2])
    catch_up(source.folder, copies)
    assert (here / "logs" / "a.jsonl").read_bytes() == lines[0] + lines[1][:3] + b"\n" + lines[2]


def test_a_file_that_began_anew_under_its_name_keeps_the_copy_of_the_old_one(source: Source, here: Path) -> None:
    source.write("logs/a.jsonl")
    copies = NodeCopies(here)
    catch_up(source.folder, copies)
    (source.folder / "logs" / "a.jsonl").unlink()
    source.write("logs/a.jsonl")
    source.write("logs/a.jsonl")
    copies.apply(next_page(source.folder, copies.held(), limit_bytes=PAGE))
    assert b"".join(path.read_bytes() for path in kept_files(here / "logs" / "a.jsonl")) == b"".join(
        source.written["logs/a.jsonl"]
    )


def test_older_logs_go_when_their_originals_went_and_copies_of_a_lost_node_stay(source: Source, here: Path) -> None:
    name, copies = "logs/a.jsonl", NodeCopies(here)
    for _ in range(3):
        source.write(name)
        source.rotate(name)
    source.write(name)
    catch_up(source.folder, copies)
    (source.folder / "logs" / "a-000001.jsonl").unlink()
    catch_up(source.folder, copies)
    assert copied(here, name) == source.written[name][1:]
    for path in (source.folder / "logs").iterdir():
        path.unlink()
    catch_up(source.folder, copies)
    assert copied(here, name) == source.written[name][1:], "the run's folder was removed there"
    assert copies.losses.bytes == 0


def test_copies_that_were_removed_here_are_not_copied_again(source: Source, here: Path) -> None:
    name = "spans/worker-7.jsonl"
    for _ in range(3):
        source.write(name)
        source.rotate(name)
    source.compress(name)
    source.write(name)
    source.rotate(name)
    source.write(name)
    copies = NodeCopies(here)
    catch_up(source.folder, copies)
    (here / "spans" / "worker-7.000001.jsonl.zst").unlink()
    (here / "spans" / "worker-7.000004.jsonl").unlink()
    for receiver in (copies, NodeCopies(here)):
        catch_up(source.folder, receiver)
        assert sorted(path.name for path in (here / "spans").iterdir()) == [
            "worker-7.000002.jsonl.zst",
            "worker-7.000003.jsonl.zst",
            "worker-7.jsonl",
        ]


def test_what_is_gone_before_it_was_copied_is_counted(
    source: Source, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        source.write("logs/a.jsonl", size=1000)
    source.write("logs/b.jsonl")
    copies = NodeCopies(here)
    copies.apply(next_page(source.folder, copies.held(), limit_bytes=1500))
    left_bytes = sum(map(len, source.written["logs/a.jsonl"])) - 1500
    (source.folder / "logs" / "a.jsonl").unlink()
    catch_up(source.folder, copies)
    assert (copies.losses.bytes, copies.losses.files) == (left_bytes, 1)
    assert f"{left_bytes} bytes of a file of node 0123456789ab are lost" in caplog.text
    assert NodeCopies(here).losses == copies.losses


def test_a_full_disk_here_loses_nothing(source: Source, here: Path) -> None:
    for _ in range(100):
        source.write("logs/a.jsonl", size=100)
    source.replace("spans/w.000001.jsonl.zst", b"z" * 9000)
    copies = NodeCopies(here)
    with files_of_at_most(5000), pytest.raises(OSError, match=r"large|space"):
        catch_up(source.folder, copies)
    catch_up(source.folder, copies)
    assert copied(here, "logs/a.jsonl") == source.written["logs/a.jsonl"]
    assert (here / "spans" / "w.000001.jsonl.zst").read_bytes() == b"z" * 9000


def test_a_whole_file_appears_only_when_it_is_complete(source: Source, here: Path) -> None:
    name = "spans/w.000001.jsonl.zst"
    source.replace(name, b"one" * 1000)
    copies = NodeCopies(here)
    copies.apply(next_page(source.folder, copies.held(), limit_bytes=1000))
    assert not (here / name).exists()
    source.replace(name, b"another" * 1000)
    catch_up(source.folder, copies, limit_bytes=1000)
    assert (here / name).read_bytes() == b"another" * 1000


@pytest.mark.parametrize("name", ["../a.jsonl", "logs/../../a.jsonl", "/logs/a.jsonl", "logs/.a.jsonl", "gateway.json"])
def test_names_outside_of_the_folders_are_refused(here: Path, name: str) -> None:
    copies = NodeCopies(here)
    piece = Piece(name, "m", 0, b"x", is_end=True)
    for page in (
        NodePage(files={}, pieces=(piece,), is_end=True),
        NodePage(files={name: ReceivedFile("m", 1)}, is_end=True),
    ):
        with pytest.raises(ValueError, match="not the name of a file"):
            copies.apply(page)
    assert not here.exists()


def test_a_second_copy_that_somebody_made_is_left_alone(source: Source, here: Path) -> None:
    for _ in range(2):
        source.write("logs/a.jsonl")
    copies = NodeCopies(here)
    catch_up(source.folder, copies)
    (here / "logs" / "a-000007.jsonl").write_bytes((here / "logs" / "a.jsonl").read_bytes())
    copies = NodeCopies(here)
    source.write("logs/a.jsonl")
    for _ in range(5):
        copies.apply(next_page(source.folder, copies.held(), limit_bytes=PAGE))
    assert (here / "logs" / "a.jsonl").read_bytes() == b"".join(source.written["logs/a.jsonl"])
    assert (here / "logs" / "a-000007.jsonl").read_bytes() == b"".join(source.written["logs/a.jsonl"][:2])


def test_a_damaged_record_costs_a_copy_and_not_the_run(source: Source, here: Path) -> None:
    source.replace("spans/w.000001.jsonl.zst", b"z")
    catch_up(source.folder, NodeCopies(here))
    for damage in (b"{", b"[]", orjson.dumps({"kept": {"a": 1}, "losses": {}})):
        (here / RECEIVED).write_bytes(damage)
        catch_up(source.folder, NodeCopies(here))
        assert (here / "spans" / "w.000001.jsonl.zst").read_bytes() == b"z"
