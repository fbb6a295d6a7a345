"""What a run directory holds, read without changing it.

Invariants:
- A ledger of an older schema is migrated in memory; the file stays as it is.
- Databases are opened read-only, so a killed process's write-ahead log is read, and neither it nor the database is
  changed. (SQLite may make an index of the log, `*-shm`, beside it.)
- Records of closed groups and undone steps are here too; nothing is taken from memory of a running buffer.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from headrace.buffer.codec import decode
from headrace.buffer.errors import CodecError, LedgerRefused
from headrace.buffer.ledger import check_schema, unreadable
from headrace.buffer.migration import migrate
from headrace.buffer.records import (
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
from headrace.buffer.schema import SCHEMA_VERSION, TABLES
from headrace.buffer.types import BatchId, RolloutId, batch_digest
from headrace.buffer.versions import PolicyVersion, VersionTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.buffer.types import Trajectory

R = TypeVar("R")
_COMPLETE = re.compile(r"\d+\.\d+")


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
class Evidence:
    """All rows. `files` maps an attempt to the number of the trajectory file it was written to. `damage` are plain
    sentences."""

    run_dir: Path
    epochs: tuple[EpochRecord, ...]
    groups: tuple[GroupRecord, ...]
    rollouts: tuple[RolloutRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    batches: tuple[BatchRecord, ...]
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

    def tree(self) -> VersionTree:
        """All epochs with their forks; the caller's own."""
        tree = VersionTree()
        for epoch in self.epochs:
            known = epoch.follows is not None and epoch.follows.epoch in tree.forks
            tree.open_epoch(epoch.epoch, epoch.follows if known else epoch.parent)
        return tree


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
    """Everything `verify` needs. Raises LedgerRefused when there is no ledger, or none that this headrace reads."""
    path = run_dir / "ledger.db"
    if not has_begun(run_dir):
        raise LedgerRefused(f"{run_dir} holds no ledger.db, or one in which nothing is: name the directory of a run")
    try:
        with closing(read_only(path)) as database:
            (schema,) = database.execute("PRAGMA user_version").fetchone()
            (application,) = database.execute("PRAGMA application_id").fetchone()
            check_schema(schema, application, path)
            if schema == SCHEMA_VERSION:
                return _evidence(run_dir, database)
            with closing(_migrated_copy(database, schema)) as copy:
                return _evidence(run_dir, copy)
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error


def _evidence(run_dir: Path, database: sqlite3.Connection) -> Evidence:
    witnesses, damage = _witnesses(run_dir / "checkpoints")
    # One read transaction: a live buffer may go on writing.
    database.execute("BEGIN")
    damage += [f"ledger.db: {row[0]}" for row in database.execute("PRAGMA quick_check") if row[0] != "ok"]
    damage += [f"ledger.db: dangling reference in {row[0]}" for row in database.execute("PRAGMA foreign_key_check")]
    stored = database.execute(
        "SELECT rollout_id, attempt, trajectory_file FROM attempts WHERE trajectory_file IS NOT NULL"
    )
    return Evidence(
        run_dir=run_dir,
        epochs=_rows(database, EpochRecord, "ORDER BY epoch"),
        groups=_rows(database, GroupRecord, "ORDER BY ordinal"),
        rollouts=_rows(database, RolloutRecord, "ORDER BY rollout_id"),
        attempts=_rows(database, AttemptRecord, "ORDER BY rollout_id, attempt"),
        batches=_rows(database, BatchRecord, "ORDER BY ordinal"),
        commits=_rows(database, CommitRecord, "ORDER BY sequence"),
        checkpoints=_rows(database, CheckpointRecord, ""),
        tasks=_rows(database, TaskRecord, "ORDER BY task_id"),
        interventions=_rows(database, InterventionRecord, "ORDER BY sequence"),
        files={(RolloutId(rollout), attempt): number for rollout, attempt, number in stored},
        witnesses=tuple(witnesses),
        damage=tuple(damage),
    )


def _migrated_copy(database: sqlite3.Connection, schema: int) -> sqlite3.Connection:
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        database.backup(copy)
        migrate(copy, schema)
    except BaseException:
        copy.close()
        raise
    return copy


def read_trajectories(
    evidence: Evidence, wanted: set[tuple[RolloutId, int]]
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
    log = path.with_name(path.name + "-wal")
    frozen = not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    uri = f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if frozen else "")
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def _rows(database: sqlite3.Connection, kind: type[R], order: str) -> tuple[R, ...]:
    table = TABLES[kind]
    records = (table.load(row) for row in database.execute(table.select(order)))
    return tuple(record for record in records if isinstance(record, kind))


def _witnesses(root: Path) -> tuple[list[Witness], list[str]]:
    found, damage = [], []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if not _COMPLETE.fullmatch(path.name):
            continue
        try:
            found.append(_witness(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            damage.append(f"checkpoint {path.name}: headrace.json is not readable ({error!r})")
    return found, damage


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
