"""What a run directory holds, read without changing it.

Invariants:
- A ledger of an older schema is migrated in memory; the file stays as it is.
- Databases are opened read-only, so a killed process's write-ahead log is read, and neither it nor the database is
  changed. (SQLite may make an index of the log, `*-shm`, beside it.)
- Records of closed groups and undone steps are here too; nothing is taken from memory of a running buffer.
- The ledger is read before its archive: what moves meanwhile is in both, and counts as the ledger has it.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headrace.buffer.audit.joined_rows import JoinedRows, histories_of
from headrace.buffer.codec import decode
from headrace.buffer.core.records import (
    AttemptRecord,
    BatchRecord,
    CheckpointRecord,
    CommitRecord,
    EpochRecord,
    GroupRecord,
    InterventionRecord,
    RolloutRecord,
    TaskRecord,
)
from headrace.buffer.errors import CodecError, LedgerRefused
from headrace.buffer.ledger.archive import ARCHIVE, SKIPPED, STEPS, closed_rollouts, totals_of
from headrace.buffer.ledger.ledger import check_schema, unreadable
from headrace.buffer.ledger.migration import migrate
from headrace.buffer.ledger.schema import SCHEMA_VERSION
from headrace.buffer.types import BatchId, RolloutId, batch_digest
from headrace.buffer.versions import PolicyVersion, VersionTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from headrace.buffer.audit.joined_rows import GroupHistory
    from headrace.buffer.core.records import RolloutState
    from headrace.buffer.types import Trajectory

_COMPLETE = re.compile(r"\d+\.\d+")
B = TypeVar("B")
READINGS: Final = 20
"""Of the checkpoints, until none is saved or removed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A checkpoint directory's own account: (batch id, digest) since the previous one, and the hash chain before and
    after them."""

    path: Path
    version: PolicyVersion
    previous_chain: str
    chain: str
    batches: tuple[tuple[BatchId, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a run directory holds beside groups and batches. `files` maps an attempt to the number of the trajectory
    file it was written to. `damage` are plain sentences."""

    run_dir: Path
    epochs: tuple[EpochRecord, ...]
    commits: tuple[CommitRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    tasks: tuple[TaskRecord, ...]
    interventions: tuple[InterventionRecord, ...]
    files: dict[tuple[RolloutId, int], int]
    witnesses: tuple[Witness, ...]
    damage: tuple[str, ...]

    @property
    def surviving(self) -> list[CommitRecord]:
        """The steps that no resume undid, in their order."""
        return [commit for commit in self.commits if commit.rolled_back_by is None]

    @property
    def undone(self) -> list[CommitRecord]:
        """The steps of the surviving path that a return to the newest checkpoint undoes; none without a checkpoint."""
        return _undone(self.commits, self.witnesses)

    def tree(self) -> VersionTree:
        """All epochs with their forks; the caller's own."""
        tree = VersionTree()
        for epoch in self.epochs:
            known = epoch.follows is not None and epoch.follows.epoch in tree.forks
            tree.open_epoch(epoch.epoch, epoch.follows if known else epoch.parent)
        return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What the ledger counts of its archive: rollouts by state, surviving steps with an update."""

    rollouts: Mapping[RolloutState, int]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Steps):
    """All rows in memory: for runs of days, or what is open in one of months. Those of months are `streamed`."""

    groups: tuple[GroupRecord, ...]
    rollouts: tuple[RolloutRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    batches: tuple[BatchRecord, ...]
    closed: Closed | None = None
    """What is left out: None says that everything is here."""

    def histories(self) -> Iterator[GroupHistory]:
        """Groups with members and attempts, in the order of sealing, those that are not sealed last."""
        groups = sorted(self.groups, key=lambda group: (group.seal_order is None, group.seal_order or group.ordinal))
        return histories_of(groups, self.rollouts, self.attempts)

    def count(self, table: str) -> int:
        return len(getattr(self, table))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedEvidence(Steps):
    """Groups, rollouts, attempts and batches are read whenever they are asked for."""

    rows: JoinedRows

    @property
    def batches(self) -> Iterator[BatchRecord]:
        return self.rows.of(BatchRecord, "ordinal")

    def offered(self) -> tuple[int, float | None]:
        """How many attempts ended with a result, and when the first of all was issued."""
        found = self.rows.select("attempts", ("coalesce(sum(offered), 0)", "min(issued_at_s)")).fetchall()
        return sum(count for count, _ in found), min((at_s for _, at_s in found if at_s is not None), default=None)

    def histories(self) -> Iterator[GroupHistory]:
        """See `Evidence.histories`."""
        return self.rows.histories()

    def count(self, table: str) -> int:
        return self.rows.count(table)

    @property
    def closed(self) -> Closed | None:
        return None


def has_begun(run_dir: Path) -> bool:
    """Whether anything was recorded: false without a ledger, and for one whose process died while it made the file.
    Raises LedgerRefused when it is not readable, or is not there while there is what only a ledger leads to."""
    path = run_dir / "ledger.db"
    begun = path.is_file() and _holds_anything(path)
    if not begun and (left := next(_left_of_a_ledger(run_dir), None)) is not None:
        raise LedgerRefused(
            f"{path} is missing or empty, but there is {left}: put the ledger back; the newest checkpoint has a copy, "
            "ledger.db"
        )
    return begun


def _left_of_a_ledger(run_dir: Path) -> Iterator[Path]:
    yield from sorted((run_dir / "checkpoints").glob("[0-9]*.[0-9]*"))
    yield from sorted((run_dir / "trajectories").glob("*.db"))


def _holds_anything(path: Path) -> bool:
    try:
        with closing(read_only(path)) as database:
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (schema,) = database.execute("PRAGMA user_version").fetchone()
            return bool(tables or schema)
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error


def read_evidence(run_dir: Path) -> Evidence:
    """Everything, in memory. Raises LedgerRefused when there is no ledger, or none that this headrace reads."""
    with streamed(run_dir) as evidence:
        return _in_memory(evidence)


def read_open(run_dir: Path) -> Evidence:
    """What the archive does not hold, however long the run: open groups, the steps that a resume may undo, and the
    newest checkpoint. Everything, where that checkpoint goes back to steps in the archive, or there is none yet.
    Raises LedgerRefused."""
    with _reading(run_dir) as database:
        _, newest = _at_one_moment(database, run_dir, _newest_witness, lambda: begin(database))
        totals = totals_of(database)
        if totals.get(STEPS):
            rows = JoinedRows(database, attached=False)
            steps = _steps(run_dir, database, rows, newest, [])
            if newest[0] and newest[0][0].chain in {commit.chain for commit in steps["commits"]}:
                updates = totals[STEPS] - totals.get(SKIPPED, 0)
                closed = Closed(rollouts=closed_rollouts(totals), steps=updates)
                return replace(_in_memory(StreamedEvidence(**steps, rows=rows)), closed=closed)
    return read_evidence(run_dir)


def _in_memory(evidence: StreamedEvidence) -> Evidence:
    rows = evidence.rows
    steps = {name: getattr(evidence, name) for name in Steps.__dataclass_fields__}
    return Evidence(
        **steps | {"files": _files(rows)},
        groups=tuple(rows.of(GroupRecord, "ordinal")),
        rollouts=tuple(rows.of(RolloutRecord, "rollout_id")),
        attempts=tuple(rows.of(AttemptRecord, "rollout_id, attempt")),
        batches=tuple(rows.of(BatchRecord, "ordinal")),
    )


@contextmanager
def streamed(run_dir: Path) -> Iterator[StreamedEvidence]:
    """Everything `verify` needs, as it was at one moment. Raises LedgerRefused when there is no ledger, or none that
    this headrace reads."""
    path = run_dir / "ledger.db"
    with _reading(run_dir) as database:
        archive = path.with_name(ARCHIVE)
        (attached, damage), witnesses = _at_one_moment(
            database, run_dir, _witnesses, lambda: begin_with_archive(database, archive)
        )
        rows = JoinedRows(database, attached=attached)
        if attached:
            checks = database.execute("PRAGMA archive.quick_check")
            damage += [f"{ARCHIVE}: {row[0]}" for row in checks if row[0] != "ok"]
        yield StreamedEvidence(**_steps(run_dir, database, rows, witnesses, damage), rows=rows)


def _at_one_moment(
    database: sqlite3.Connection,
    run_dir: Path,
    read: Callable[[Path], tuple[list[Witness], list[str]]],
    begin_reading: Callable[[], B],
) -> tuple[B, tuple[list[Witness], list[str]]]:
    """Begin one read transaction, for a live buffer may go on writing, and read the checkpoints that belong to it: with
    one that is saved meanwhile, or removed, both are read again."""
    root = run_dir / "checkpoints"
    for left in reversed(range(READINGS)):
        before = _checkpoints(root)
        begun = begin_reading()
        witnesses = read(root)
        if left == 0 or _checkpoints(root) == before:
            break
        database.execute("ROLLBACK")
    return begun, witnesses


def begin(database: sqlite3.Connection) -> None:
    """Begin one read transaction over a ledger alone."""
    database.execute("BEGIN")
    # The first read fixes what all others see.
    database.execute("SELECT count(*) FROM main.sqlite_master").fetchone()


def begin_with_archive(database: sqlite3.Connection, path: Path) -> tuple[bool, list[str]]:
    """Begin one read transaction over a ledger and the archive beside it: whether there is one that fits the ledger,
    as `archive`, and what is wrong with it. A live buffer may begin its archive meanwhile."""
    while True:
        there = path.is_file()
        damage = _attach(database, path) if there else []
        # The ledger first: what has left it by then is in the archive.
        begin(database)
        if there or not path.is_file():
            return (False, damage) if damage else _fits(database, there=there)
        database.execute("ROLLBACK")


def _attach(database: sqlite3.Connection, path: Path) -> list[str]:
    """What is wrong with it."""
    attached = {name for _, name, _ in database.execute("PRAGMA database_list")}
    try:
        if "archive" not in attached:
            database.execute("ATTACH ? AS archive", (_uri(path),))
    except sqlite3.DatabaseError as error:
        return [f"{ARCHIVE} is not readable: {error}"]
    return []


def _fits(database: sqlite3.Connection, *, there: bool) -> tuple[bool, list[str]]:
    closed = sum(closed_rollouts(totals_of(database)).values())
    missing = [f"{ARCHIVE} is missing: {closed} rollouts of closed groups are in it"] if closed else []
    if not there:
        return False, missing
    try:
        (tables,) = database.execute("SELECT count(*) FROM archive.sqlite_master").fetchone()
        (schema,) = database.execute("PRAGMA archive.user_version").fetchone()
    except sqlite3.DatabaseError as error:
        return False, [f"{ARCHIVE} is not readable: {error}"]
    if not tables and not schema:
        # It is being begun just now, or whoever began it died.
        return False, missing
    if schema != SCHEMA_VERSION:
        return False, [f"{ARCHIVE} has schema {schema}, the ledger {SCHEMA_VERSION}"]
    return True, []


@contextmanager
def _reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """The ledger, of today's schema; an older one is migrated in a copy that is in no folder of the run."""
    path = run_dir / "ledger.db"
    if not has_begun(run_dir):
        raise LedgerRefused(f"{run_dir} holds no ledger.db, or one in which nothing is: name the directory of a run")
    try:
        with closing(read_only(path)) as database:
            (schema,) = database.execute("PRAGMA user_version").fetchone()
            (application,) = database.execute("PRAGMA application_id").fetchone()
            check_schema(schema, application, path)
            if schema == SCHEMA_VERSION:
                yield database
                return
            with closing(_migrated_copy(database, schema)) as copy:
                yield copy
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error


def _steps(
    run_dir: Path,
    database: sqlite3.Connection,
    rows: JoinedRows,
    found: tuple[list[Witness], list[str]],
    damage: list[str],
) -> dict[str, Any]:
    """The fields of `Steps`."""
    witnesses, unreadable_ones = found
    damage += unreadable_ones
    damage += [f"ledger.db: {row[0]}" for row in database.execute("PRAGMA main.quick_check") if row[0] != "ok"]
    dangling = database.execute("PRAGMA main.foreign_key_check")
    damage += [f"ledger.db: dangling reference in {row[0]}" for row in dangling]
    commits = tuple(rows.of(CommitRecord, "sequence"))
    return {
        "run_dir": run_dir,
        "epochs": tuple(rows.of(EpochRecord, "epoch")),
        "commits": commits,
        "checkpoints": tuple(rows.of(CheckpointRecord, "version")),
        "tasks": tuple(rows.of(TaskRecord, "task_id")),
        "interventions": tuple(rows.of(InterventionRecord, "sequence")),
        # What else is closed is in no file that must be there.
        "files": _files(JoinedRows(database, attached=False)) | _files_of(rows, _undone(commits, witnesses)),
        "witnesses": tuple(witnesses),
        "damage": tuple(damage),
    }


def _undone(commits: Sequence[CommitRecord], witnesses: Sequence[Witness]) -> list[CommitRecord]:
    path = [commit for commit in commits if commit.rolled_back_by is None]
    newest = max(witnesses, key=lambda witness: witness.version, default=None)
    if newest is None:
        return []
    places = [place for place, commit in enumerate(path, start=1) if commit.chain == newest.chain]
    if newest.chain and not places:
        return []
    return path[places[0] :] if places else path


def _files_of(rows: JoinedRows, steps: Sequence[CommitRecord]) -> dict[tuple[RolloutId, int], int]:
    """Of the rollouts that these steps trained."""
    if not steps:
        return {}
    these = "batch_id IN (SELECT value FROM json_each(?))"
    found = rows.select("batches", ("members",), where=these, values=(json.dumps([step.batch_id for step in steps]),))
    members = json.dumps([rollout_id for (text,) in found for rollout_id, *_ in json.loads(text)])
    return _files(rows, "rollout_id IN (SELECT value FROM json_each(?))", (members,))


def _files(rows: JoinedRows, where: str = "true", values: tuple[object, ...] = ()) -> dict[tuple[RolloutId, int], int]:
    columns = ("rollout_id", "attempt", "trajectory_file")
    stored = rows.select("attempts", columns, where=f"trajectory_file IS NOT NULL AND {where}", values=values)
    return {(RolloutId(rollout), attempt): number for rollout, attempt, number in stored}


def _migrated_copy(database: sqlite3.Connection, schema: int) -> sqlite3.Connection:
    # Without a name: a temporary file, which a ledger of months needs.
    copy = sqlite3.connect("", isolation_level=None)
    try:
        database.backup(copy)
        migrate(copy, schema)
    except BaseException:
        copy.close()
        raise
    return copy


def read_trajectories(
    evidence: Steps, wanted: set[tuple[RolloutId, int]]
) -> Iterator[tuple[tuple[RolloutId, int], Trajectory | None]]:
    """The trajectories of these attempts; None for one that is missing or damaged."""
    by_file: dict[int, list[tuple[RolloutId, int]]] = {}
    for key in sorted(wanted):
        by_file.setdefault(evidence.files.get(key, 0), []).append(key)
    for number, keys in by_file.items():
        path = evidence.run_dir / "trajectories" / f"{number:06d}.db"
        if not path.is_file():
            yield from ((key, None) for key in keys)
            continue
        with closing(read_only(path)) as database:
            for key in keys:
                yield key, _trajectory(database, key)


def _trajectory(database: sqlite3.Connection, key: tuple[RolloutId, int]) -> Trajectory | None:
    query = "SELECT data FROM trajectories WHERE rollout_id = ? AND attempt = ?"
    try:
        row = database.execute(query, key).fetchone()
        return decode(row[0]) if row else None
    except (sqlite3.DatabaseError, CodecError):
        return None


def read_only(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing. On a disk that cannot be written SQLite can make no index of a log: without
    one it takes the file as it is."""
    return sqlite3.connect(_uri(path), uri=True, isolation_level=None)


def _uri(path: Path) -> str:
    log = path.with_name(path.name + "-wal")
    frozen = not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if frozen else "")


def _witnesses(root: Path) -> tuple[list[Witness], list[str]]:
    """What checkpoints say, and which cannot be read."""
    found, damage = [], []
    for path in _checkpoints(root):
        try:
            found.append(_witness(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            damage.append(f"checkpoint {path.name}: headrace.json is not readable ({error!r})")
    return found, damage


def _newest_witness(root: Path) -> tuple[list[Witness], list[str]]:
    """Of the newest checkpoint alone, and what is wrong with it."""
    newest = max(_checkpoints(root), key=lambda path: PolicyVersion.parse(path.name), default=None)
    if newest is None:
        return [], []
    try:
        return [_witness(newest)], []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [], [f"checkpoint {newest.name}: headrace.json is not readable ({error!r})"]


def _checkpoints(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if _COMPLETE.fullmatch(path.name)) if root.is_dir() else []


def _witness(path: Path) -> Witness:
    document = json.loads((path / "headrace.json").read_text(encoding="utf-8"))
    if document["format"] != 1:
        raise ValueError(f"format {document['format']}, this headrace reads 1")
    batches = (
        (BatchId(batch["batch_id"]), tuple((RolloutId(rollout), int(attempt)) for rollout, attempt in batch["members"]))
        for batch in document["batches"]
    )
    return Witness(
        path=path,
        version=PolicyVersion.parse(document["version"]),
        previous_chain=str(document["previous_chain"]),
        chain=str(document["chain"]),
        batches=tuple((batch_id, batch_digest(batch_id, members)) for batch_id, members in batches),
    )
