"""Tables of records in a SQLite file: what they keep, what they refuse, and what they say."""

from __future__ import annotations

import os
import pickle
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.primitives.tables import TableDamaged, TableDiskError, TableError, TableFile, TableInUse
from headrace.sandboxes.linux import syscalls

STAMP = (0x54455354, 1)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    owner: str
    number: int
    colour: Colour = Colour.RED
    part: Part | None = None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherThing:
    owner: str
    number: int
    weight: float


FULL = Thing(owner="a", number=1, colour=Colour.BLUE, part=Part("x\n'\"", (1, 2)), labels={"k": "v"})


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "t.db", STAMP)
    things = file.table("things", Thing, "owner", "number")
    things.put(Thing(owner="b", number=2))
    things.put(FULL)
    things.put(Thing(owner="b", number=10))
    things.put(Thing(owner="b", number=2, colour=Colour.BLUE))
    things.drop("b", 10)
    things.drop("b", 99)
    file.close()
    file.close()
    file = TableFile(tmp_path / "t.db", STAMP)
    things = file.table("things", Thing, "owner", "number")
    assert things.all() == [FULL, Thing(owner="b", number=2, colour=Colour.BLUE)]
    assert things.get("a", 1) == FULL
    assert things.get("a", 2) is None
    file.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_records_are_chosen_and_ordered_by_the_beginning_of_their_key() -> None:
    things = TableFile(None, STAMP).table("things", Thing, "owner", "number")
    for number in (10, 9, 11):
        for owner in ("b", "a"):
            things.put(Thing(owner=owner, number=number))
    assert [(one.owner, one.number) for one in things.all()][:4] == [("a", 9), ("a", 10), ("a", 11), ("b", 9)]
    assert [one.number for one in things.all("b")] == [9, 10, 11]
    assert [one.number for one in things.all("b", after=9)] == [10, 11]
    assert things.last("b") == Thing(owner="b", number=11)
    assert things.last("c") is None
    with pytest.raises(sqlite3.ProgrammingError, match="number of bindings"):
        things.drop("a")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 3), st.sampled_from(Colour))))
def test_a_table_is_a_dictionary(steps: list[tuple[bool, str, int, Colour]]) -> None:
    file, expected = TableFile(None, STAMP), dict[tuple[str, int], Thing]()
    things = file.table("things", Thing, "owner", "number")
    for puts, owner, number, colour in steps:
        if puts:
            expected[owner, number] = Thing(owner=owner, number=number, colour=colour)
            things.put(expected[owner, number])
        else:
            expected.pop((owner, number), None)
            things.drop(owner, number)
    assert things.all() == [expected[key] for key in sorted(expected)]
    file.close()


def test_an_error_in_a_transaction_undoes_all_of_it(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "t.db", STAMP)
    things = file.table("things", Thing, "owner", "number")
    others = file.table("others", OtherThing, "owner", "number")
    things.put(FULL)
    with pytest.raises(KeyError), file.transaction():
        things.drop("a", 1)
        others.put(OtherThing(owner="a", number=1, weight=0.5))
        raise KeyError
    assert (things.all(), others.all()) == ([FULL], [])
    file.close()


@pytest.mark.parametrize(("durable", "synchronous"), [(True, 2), (False, 1)])
def test_only_a_durable_file_waits_for_the_disk(tmp_path: Path, *, durable: bool, synchronous: int) -> None:
    file = TableFile(tmp_path / "t.db", STAMP, durable=durable)
    assert file.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    file.close()


@pytest.mark.parametrize("kind", ["text", "program", "unstamped", "schema"])
def test_a_file_of_another_kind_is_refused_and_not_changed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.db"
    if kind == "text":
        path.write_bytes(b"no database" * 1000)
    else:
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE x (y)")
            database.execute(f"PRAGMA application_id = {0 if kind == 'unstamped' else STAMP[0] + (kind == 'program')}")
            database.execute(f"PRAGMA user_version = {2 if kind == 'schema' else 0}")
    path.chmod(0o600)
    before = path.read_bytes()
    for _ in range(2):
        # The second one finds no lock that the first has left.
        with pytest.raises(TableDamaged, match="move it away") as refused:
            TableFile(path, STAMP)
        assert "\n" not in str(refused.value)
    assert path.read_bytes() == before
    assert type(pickle.loads(pickle.dumps(refused.value))) is TableDamaged


def test_a_record_of_another_form_is_refused(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "t.db", STAMP)
    file.table("things", Thing, "owner", "number").put(FULL)
    with pytest.raises(TableDamaged, match="another form of OtherThing"):
        file.table("things", OtherThing, "owner", "number").all()
    file.close()
    file = TableFile(tmp_path / "t.db", STAMP)
    with pytest.raises(TableDamaged, match="table things has 3 columns"):
        file.table("things", Part, "name").put(Part("a"))
    file.close()


def test_damage_that_opening_does_not_show_is_reported_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    file = TableFile(path, STAMP)
    things = file.table("things", Thing, "owner", "number")
    with file.transaction():
        for number in range(1000):
            things.put(Thing(owner="a", number=number))
    file.close()
    with path.open("r+b") as raw:
        raw.seek(3 * 4096)
        raw.write(os.urandom(path.stat().st_size - 3 * 4096))
    file = TableFile(path, STAMP)
    with pytest.raises(TableDamaged, match="restore it"):
        file.table("things", Thing, "owner", "number").all()
    file.close()


def test_a_file_has_one_process_at_a_time(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "t.db", STAMP)
    with pytest.raises(TableInUse, match="in use by another process"):
        TableFile(tmp_path / "t.db", STAMP)
    file.close()
    TableFile(tmp_path / "t.db", STAMP).close()


def test_a_folder_that_is_missing_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(TableDiskError, match="No such file"):
        TableFile(tmp_path / "absent" / "t.db", STAMP)


@pytest.mark.namespaces
def test_a_full_disk_is_named_and_loses_nothing_that_was_written(tmp_path: Path) -> None:
    syscalls.mount("tmpfs", str(tmp_path), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=700")
    try:
        file = TableFile(tmp_path / "t.db", STAMP, durable=True)
        things = file.table("things", Thing, "owner", "number")
        written = 0
        with pytest.raises(TableDiskError, match=r"full.*repair the disk"):
            for written in range(1000):
                things.put(Thing(owner="a" * 10_000, number=written))
        assert written > 10
        assert [one.number for one in things.all()] == list(range(written))
        file.close()
        things = (file := TableFile(tmp_path / "t.db", STAMP)).table("things", Thing, "owner", "number")
        assert len(things.all()) == written
        file.close()
    finally:
        syscalls.detach(str(tmp_path))


WRITING = f"""
import itertools, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tables import STAMP, TableFile, Thing
things = TableFile(Path(sys.argv[1]), STAMP).table("things", Thing, "owner", "number")
for number in itertools.count():
    things.put(Thing(owner="a", number=number))
    print(number, flush=True)
"""


def test_a_killed_process_keeps_what_it_wrote_and_leaves_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(tmp_path / "t.db")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        written = [int(process.stdout.readline()) for _ in range(40)]
        process.kill()
        written += [int(line) for line in process.stdout.read().splitlines()]
    file = TableFile(tmp_path / "t.db", STAMP)
    stored = [one.number for one in file.table("things", Thing, "owner", "number").all()]
    assert stored[: len(written)] == written
    assert len(stored) <= len(written) + 1
    file.close()


def test_every_error_has_one_base() -> None:
    assert {TableInUse, TableDamaged, TableDiskError} == set(TableError.__subclasses__())
