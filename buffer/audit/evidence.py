"""The contents of a run directory as evidence for audits, read without changing it.

Invariants:
- Databases are opened read-only, so a killed process's write-ahead log is read, and neither it nor the database is
  changed. (SQLite may create an index of the log, `*-shm`, beside it.)
- Records of closed groups and undone steps are included; nothing is taken from a running buffer's memory.
- The ledger is read before its archive: rows that are moved in between appear in both, and the ledger's copies count.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from headrace.buffer.audit.joined_rows import GroupHistory, JoinedRows, histories_of
from headrace.buffer.core.epochs import EPOCHS_RESERVED
from headrace.buffer.core.records import (
    FINAL,
    AttemptRecord,
    BatchRecord,
    CheckpointRecord,
    CommitRecord,
    EpochRecord,
    GroupRecord,
    InterventionRecord,
    RolloutRecord,
    RolloutState,
    TaskRecord,
)
from headrace.buffer.core.source_names import ended_counter, source_name
from headrace.buffer.errors import CodecError, LedgerRefused
from headrace.buffer.ledger.archive import ARCHIVE, SKIPPED, STEPS, closed_rollouts, totals_of
from headrace.buffer.ledger.ledger import SOURCES, check_stamp, newest_copy_of, unreadable
from headrace.buffer.ledger.schema import SCHEMA_VERSION
from headrace.buffer.trajectories.codec import decode
from headrace.buffer.trajectories.types import BatchId, RolloutId, Trajectory, batch_digest
from headrace.buffer.trajectories.versions import PolicyVersion, VersionTree

_COMPLETE = re.compile(r"\d+\.\d+")
B = TypeVar("B")
READINGS: Final = 20
"""Maximum number of attempts to read the checkpoints without one being saved or removed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Batches that a checkpoint directory records: the (batch id, digest) pairs since the previous checkpoint, and the
    hash chain before and after these batches."""

    path: Path
    version: PolicyVersion
    previous_chain: str
    chain: str
    batches: tuple[tuple[BatchId, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Contents of a run directory other than groups and batches. `files` maps an attempt to the number of the
    trajectory file it was written to. No epoch up to `epochs_reserved` is opened any more. `damage` describes each
    defect in a plain sentence."""

    run_dir: Path
    epochs: tuple[EpochRecord, ...]
    commits: tuple[CommitRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    tasks: tuple[TaskRecord, ...]
    interventions: tuple[InterventionRecord, ...]
    files: dict[tuple[RolloutId, int], int]
    witnesses: tuple[Witness, ...]
    epochs_reserved: int
    damage: tuple[str, ...]
    sources: Mapping[str, float] = field(default_factory=dict)
    """Shares of the run's sources of tasks, by name; empty in a run without sources."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """The ledger's counters of rollouts that ended, by `source/state`, from which the quotas of batches follow."""

    @property
    def surviving(self) -> list[CommitRecord]:
        """Steps that no resume has undone, in order."""
        return [commit for commit in self.commits if commit.rolled_back_by is None]

    @property
    def undone(self) -> list[CommitRecord]:
        """Steps of the surviving path that a return to the newest checkpoint would undo; empty if there is no
        checkpoint."""
        return _undone(self.commits, self.witnesses)

    def source_of(self, task_id: str) -> str:
        """Return the name of a task's source; empty in a run without sources."""
        return source_name(task_id) if self.sources else ""

    def tree(self) -> VersionTree:
        """Return a new version tree with all epochs and their forks."""
        tree = VersionTree()
        for epoch in self.epochs:
            known = epoch.follows is not None and epoch.follows.epoch in tree.forks
            tree.open_epoch(epoch.epoch, epoch.follows if known else epoch.parent)
        return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Totals that the ledger keeps of its archive: rollouts by state, and surviving steps that updated the weights."""

    rollouts: Mapping[RolloutState, int]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Steps):
    """Evidence held in memory: all rows of a run that lasted up to a few days, or only the open rows of a longer one.
    To read all rows of a longer run, use `streamed`."""

    groups: tuple[GroupRecord, ...]
    rollouts: tuple[RolloutRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    batches: tuple[BatchRecord, ...]
    closed: Closed | None = None
    """Totals of the rows that were not read; None when all rows are included."""

    def histories(self) -> Iterator[GroupHistory]:
        """Yield the groups with their members and attempts, in the order of sealing; unsealed groups come last."""
        groups = sorted(self.groups, key=lambda group: (group.seal_order is None, group.seal_order or group.ordinal))
        return histories_of(groups, self.rollouts, self.attempts)

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return len(getattr(self, table))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedEvidence(Steps):
    """Evidence whose groups, rollouts, attempts and batches are read from disk on each use."""

    rows: JoinedRows

    @property
    def batches(self) -> Iterator[BatchRecord]:
        return self.rows.of(BatchRecord, "ordinal")

    def offered(self) -> tuple[int, float | None]:
        """Return the number of attempts that ended with a result, and the time when the first attempt was issued."""
        found = self.rows.select("attempts", ("coalesce(sum(offered), 0)", "min(issued_at_s)")).fetchall()
        return sum(count for count, _ in found), min((at_s for _, at_s in found if at_s is not None), default=None)

    def histories(self) -> Iterator[GroupHistory]:
        """Yield the groups in the same way as `Evidence.histories`."""
        return self.rows.histories()

    def count(self, table: str) -> int:
        return self.rows.count(table)

    @property
    def closed(self) -> Closed | None:
        return None


def has_begun(run_dir: Path) -> bool:
    """Return whether anything has been recorded: false if there is no ledger, or if the process died while creating the
    file. Raises LedgerRefused when the ledger is not readable, or is missing although there are checkpoints or
    trajectories."""
    path = run_dir / "ledger.db"
    if path.is_file():
        try:
            with closing(read_only(path)) as database:
                (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                (schema,) = database.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise unreadable(path, error) from error
        if tables or schema:
            return True
    checkpoints = sorted((run_dir / "checkpoints").glob("[0-9]*.[0-9]*"))
    left = next(iter((*checkpoints, *sorted((run_dir / "trajectories").glob("*.db")))), None)
    if left is not None:
        raise LedgerRefused(
            f"{path} is missing or empty, but there is {left}: restore the ledger, "
            f"from its newest copy: {newest_copy_of(path)}"
        )
    return False


def read_evidence(run_dir: Path) -> Evidence:
    """Read everything into memory. Raises LedgerRefused when there is no ledger that this version of headrace can
    read."""
    with streamed(run_dir) as evidence:
        return _in_memory(evidence)


def read_open(run_dir: Path) -> Evidence:
    """Read only the rows outside the archive (open groups and the steps that a resume may undo) and the newest
    checkpoint, so that the time does not depend on the length of the run. If the checkpoint returns to archived steps,
    or if there is none yet, read everything. Raises LedgerRefused."""
    with reading(run_dir) as (database, _):
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
    """Open a consistent snapshot of the evidence that `verify` needs. Raises LedgerRefused when there is no ledger that
    this version of headrace can read."""
    with reading(run_dir) as (database, archive):
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
    """Begin one read transaction, since a live buffer may continue to write, and read the checkpoints that belong to
    it. When a checkpoint is saved or removed meanwhile, read both again."""
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
    """Begin one read transaction over a ledger and the archive beside it. Return whether a matching archive exists (it
    is then attached as `archive`), and any problems with it."""
    while True:
        there, damage = path.is_file(), ""
        attached = {name for _, name, _ in database.execute("PRAGMA database_list")}
        if there and "archive" not in attached:
            try:
                database.execute("ATTACH ? AS archive", (_uri(path),))
            except sqlite3.DatabaseError as error:
                damage = f"{ARCHIVE} is not readable: {error}"
        # The ledger first: rows that have left it by then are in the archive.
        begin(database)
        # A live buffer may create its archive meanwhile.
        if there or not path.is_file():
            break
        database.execute("ROLLBACK")
    closed = sum(closed_rollouts(totals_of(database)).values())
    missing = [f"{ARCHIVE} is missing: it holds {closed} rollouts of closed groups"] if closed else []
    if damage:
        return False, [damage]
    if not there:
        return False, missing
    try:
        (tables,) = database.execute("SELECT count(*) FROM archive.sqlite_master").fetchone()
        (schema,) = database.execute("PRAGMA archive.user_version").fetchone()
    except sqlite3.DatabaseError as error:
        return False, [f"{ARCHIVE} is not readable: {error}"]
    if not tables and not schema:
        # It is just being created, or its creator died.
        return False, missing
    if schema != SCHEMA_VERSION:
        return False, [f"{ARCHIVE} has schema {schema}, but the ledger has schema {SCHEMA_VERSION}"]
    return True, []


@contextmanager
def reading(run_dir: Path) -> Iterator[tuple[sqlite3.Connection, Path]]:
    """Open the ledger, with the path of its archive, which may be missing. Raises LedgerRefused."""
    path = run_dir / "ledger.db"
    if not has_begun(run_dir):
        raise LedgerRefused(f"{run_dir} has no ledger.db, or an empty one: name the directory of a run")
    try:
        with closing(read_only(path)) as database:
            check_stamp(database, path)
            yield database, path.with_name(ARCHIVE)
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error


@contextmanager
def rows_of(run_dir: Path) -> Iterator[JoinedRows]:
    """Open the rows of a ledger and of its archive, as far as there is a readable one. Raises LedgerRefused."""
    with reading(run_dir) as (database, archive):
        attached, _ = begin_with_archive(database, archive)
        yield JoinedRows(database, attached=attached)


def _steps(
    run_dir: Path,
    database: sqlite3.Connection,
    rows: JoinedRows,
    found: tuple[list[Witness], list[str]],
    damage: list[str],
) -> dict[str, Any]:
    """Return the fields of `Steps`."""
    witnesses, unreadable_ones = found
    damage += unreadable_ones
    damage += [f"ledger.db: {row[0]}" for row in database.execute("PRAGMA main.quick_check") if row[0] != "ok"]
    dangling = database.execute("PRAGMA main.foreign_key_check")
    damage += [f"ledger.db: dangling reference in {row[0]}" for row in dangling]
    reserved = database.execute("SELECT value FROM main.counters WHERE name = ?", (EPOCHS_RESERVED,)).fetchone()
    sources = database.execute("SELECT value FROM main.meta WHERE key = ?", (SOURCES,)).fetchone()
    shares = json.loads(sources[0]) if sources else {}
    ends = [ended_counter(name, state) for name in shares for state in FINAL]
    counters = dict(database.execute("SELECT name, value FROM main.counters")) if shares else {}
    commits = tuple(rows.of(CommitRecord, "sequence"))
    # Of closed groups only those trained in undone steps need their files.
    files, these = _files(JoinedRows(database, attached=False)), "IN (SELECT value FROM json_each(?))"
    if undone := _undone(commits, witnesses):
        ids = json.dumps([commit.batch_id for commit in undone])
        found_batches = rows.select("batches", ("members",), where=f"batch_id {these}", values=(ids,))
        members = json.dumps([rollout_id for (text,) in found_batches for rollout_id, *_ in json.loads(text)])
        files |= _files(rows, f"rollout_id {these}", (members,))
    return {
        "run_dir": run_dir,
        "epochs": tuple(rows.of(EpochRecord, "epoch")),
        "commits": commits,
        "checkpoints": tuple(rows.of(CheckpointRecord, "version")),
        "tasks": tuple(rows.of(TaskRecord, "task_id")),
        "interventions": tuple(rows.of(InterventionRecord, "sequence")),
        "files": files,
        "witnesses": tuple(witnesses),
        "epochs_reserved": 0 if reserved is None else int(reserved[0]),
        "damage": tuple(damage),
        "sources": shares,
        "ended": {counter: counters[counter] for counter in ends if counters.get(counter)},
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


def _files(rows: JoinedRows, where: str = "true", values: tuple[object, ...] = ()) -> dict[tuple[RolloutId, int], int]:
    columns = ("rollout_id", "attempt", "trajectory_file")
    stored = rows.select("attempts", columns, where=f"trajectory_file IS NOT NULL AND {where}", values=values)
    return {(RolloutId(rollout), attempt): number for rollout, attempt, number in stored}


def read_trajectories(
    evidence: Steps, wanted: set[tuple[RolloutId, int]]
) -> Iterator[tuple[tuple[RolloutId, int], Trajectory | None]]:
    """Yield the trajectories of the wanted attempts, with None for each that is missing or damaged."""
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
                yield key, read_trajectory(database, *key)


def read_trajectory(database: sqlite3.Connection, rollout_id: str, attempt: int) -> Trajectory | None:
    """Return a trajectory from an open trajectory file; None when it is missing or damaged."""
    query = "SELECT data FROM trajectories WHERE rollout_id = ? AND attempt = ?"
    try:
        row = database.execute(query, (rollout_id, attempt)).fetchone()
        return decode(row[0]) if row else None
    except (sqlite3.DatabaseError, CodecError):
        return None


def read_only(path: Path) -> sqlite3.Connection:
    """Open a connection that changes nothing. On a read-only disk, where SQLite cannot create an index for the
    write-ahead log, a database without a log can still be read."""
    return sqlite3.connect(_uri(path), uri=True, isolation_level=None)


def _uri(path: Path) -> str:
    log = path.with_name(path.name + "-wal")
    frozen = not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if frozen else "")


def _witnesses(root: Path) -> tuple[list[Witness], list[str]]:
    """Return the records of all checkpoints, and a description of each that cannot be read."""
    found, damage = [], []
    for path in _checkpoints(root):
        try:
            found.append(_witness(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damage.append(f"checkpoint {path.name}: headrace.json is not readable ({error!r})")
    return found, damage


def _newest_witness(root: Path) -> tuple[list[Witness], list[str]]:
    """Return the record of the newest checkpoint only, and any problems with it."""
    newest = max(_checkpoints(root), key=lambda path: PolicyVersion.parse(path.name), default=None)
    if newest is None:
        return [], []
    try:
        return [_witness(newest)], []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [], [f"checkpoint {newest.name}: headrace.json is not readable ({error!r})"]


def _checkpoints(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if _COMPLETE.fullmatch(path.name)) if root.is_dir() else []


def _witness(path: Path) -> Witness:
    document = json.loads((path / "headrace.json").read_text(encoding="utf-8"))
    # Both formats have the same entries for the batches.
    if document["format"] not in (1, 2):
        raise ValueError(f"has format {document['format']}, but this version of headrace reads formats 1 and 2")
    batches = (
        (BatchId(batch["batch_id"]), tuple((RolloutId(rollout), int(attempt)) for rollout, attempt in batch["members"]))
        for batch in document["batches"]
    )
    # Only hexadecimal digits can be continued, as the audit of the chain does.
    bytes.fromhex(document["previous_chain"])
    return Witness(
        path=path,
        version=PolicyVersion.parse(document["version"]),
        previous_chain=str(document["previous_chain"]),
        chain=str(document["chain"]),
        batches=tuple((batch_id, batch_digest(batch_id, members)) for batch_id, members in batches),
    )
