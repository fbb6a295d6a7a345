"""The ledger on disk: `<run>/ledger.db` and the trajectories beside it. Synchronous, for one thread.

Invariants:
- One process has a ledger open for writing (a lock that dies with the process).
- When `write` returns, everything it was given is on disk; when it raises, nothing of it is visible in the ledger.
- A trajectory is on disk before the row that refers to it. A crash between the two leaves a blob without a row, which
  is harmless.
- Trajectory files rotate by size; `drop_covered` deletes whole files that no retained checkpoint needs any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headrace.buffer.codec import decode, encode
from headrace.buffer.durable_files import fsync
from headrace.buffer.errors import LedgerBroken, LedgerInUse, LedgerRefused
from headrace.buffer.local_disk import filesystem_magic, refuse_full, refuse_network
from headrace.buffer.migration import migrate
from headrace.buffer.records import OUTAGES_KEPT, EvaluationRecord, RolloutState, Snapshot
from headrace.buffer.schema import APPLICATION_ID, LEDGER_STATEMENTS, SCHEMA_VERSION, TABLES, TRAJECTORIES_DDL
from headrace.buffer.types import RolloutId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from headrace.buffer.records import Record
    from headrace.buffer.types import Trajectory

TRAJECTORY_FILE_BYTES = 256 << 20
_NEEDED_FILES = """
SELECT DISTINCT attempts.trajectory_file FROM attempts
JOIN rollouts ON rollouts.rollout_id = attempts.rollout_id AND rollouts.attempt = attempts.attempt
JOIN groups USING (group_id)
LEFT JOIN commits ON commits.batch_id = rollouts.batch_id AND commits.rolled_back_by IS NULL
WHERE attempts.trajectory_file IS NOT NULL AND (groups.closed = 0 OR commits.sequence > ?)
"""
"""Files with a trajectory that may be trained, or be trained again after a return to the step given."""
_NEWEST_OUTAGES = f"WHERE number > (SELECT coalesce(max(number), 0) FROM outages) - {OUTAGES_KEPT} ORDER BY number"
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 5000")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory to be written, by the attempt that made it."""

    rollout_id: RolloutId
    attempt: int
    trajectory: Trajectory


class Ledger:
    """Opened by `open` or `in_memory`; `close` it. After an error of `write` it must not be used any more."""

    def __init__(self, database: sqlite3.Connection, blobs: BlobFiles, lock: int | None, path: Path) -> None:
        self._database, self._blobs, self._lock, self._path = database, blobs, lock, path

    @classmethod
    def open(
        cls, run_dir: Path, identity: Mapping[str, str], *, trajectory_file_bytes: int = TRAJECTORY_FILE_BYTES
    ) -> Self:
        """Open or create the ledger of a run. `identity` (run id, tasks) must be what it was created with.

        Raises LedgerRefused, LedgerInUse."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_network(run_dir, filesystem_magic(run_dir))
            refuse_full(run_dir, shutil.disk_usage(run_dir).free)
            lock = _lock(run_dir / "ledger.lock")
        except OSError as error:
            raise LedgerRefused(
                f"{run_dir} cannot be written: {error.strerror}: choose a run directory on a disk that can"
            ) from error
        try:
            database = _connect(run_dir / "ledger.db")
            _prepare(database, identity, run_dir / "ledger.db")
            blobs = BlobFiles(run_dir / "trajectories", trajectory_file_bytes)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, sqlite3.DatabaseError):
                raise unreadable(run_dir / "ledger.db", error) from error
            raise
        fsync(run_dir)
        return cls(database, blobs, lock, run_dir / "ledger.db")

    @classmethod
    def in_memory(cls, identity: Mapping[str, str]) -> Self:
        """A ledger without files, for virtual time."""
        database = _connect(None)
        _prepare(database, identity, Path(":memory:"))
        return cls(database, BlobFiles(None, TRAJECTORY_FILE_BYTES), None, Path(":memory:"))

    def write(self, changes: Sequence[Record], trajectories: Sequence[StoredTrajectory]) -> None:
        """Make changed records and new trajectories durable. Raises sqlite3.Error, OSError, CodecError."""
        file_number = self._blobs.write(trajectories) if trajectories else None
        with _transaction(self._database):
            for kind, table in TABLES.items():
                rows = [table.row(record) for record in changes if type(record) is kind]
                if rows:
                    self._database.executemany(table.upsert(), rows)
            self._database.executemany(
                "UPDATE attempts SET trajectory_file = ? WHERE rollout_id = ? AND attempt = ?",
                [(file_number, stored.rollout_id, stored.attempt) for stored in trajectories],
            )

    def load(self, *, history: bool = False) -> Snapshot:
        """The rows that a core is folded from; with `history` those of closed groups too."""
        wheres = {
            "groups": "WHERE closed = 0",
            "rollouts": "WHERE group_id IN (SELECT group_id FROM groups WHERE closed = 0)",
            "attempts": (
                "WHERE (rollout_id, attempt) IN (SELECT rollout_id, attempt FROM rollouts JOIN groups USING (group_id) "
                "WHERE groups.closed = 0)"
            ),
            "batches": "WHERE closed = 0",
        }
        if history:
            wheres = {"attempts": "WHERE (rollout_id, attempt) IN (SELECT rollout_id, attempt FROM rollouts)"}
        wheres |= {
            "commits": "ORDER BY sequence",
            "epochs": "ORDER BY epoch",
            "outages": _NEWEST_OUTAGES,
        }
        records: list[Record] = []
        for kind, table in TABLES.items():
            if kind is not EvaluationRecord:
                rows = self._database.execute(table.select(wheres.get(table.name, "")))
                records.extend(table.load(row) for row in rows)
        evaluations = self._database.execute("SELECT rollout_id, attempt FROM evaluations")
        closed = self._database.execute(
            "SELECT rollouts.state, count(*) FROM rollouts JOIN groups USING (group_id) "
            "WHERE groups.closed = 1 GROUP BY rollouts.state"
        )
        return Snapshot(
            records=tuple(records),
            evaluations=frozenset((RolloutId(rollout_id), attempt) for rollout_id, attempt in evaluations),
            next_ordinal=self._next("groups", "ordinal", 0),
            next_seal=self._next("groups", "seal_order", 1),
            next_batch=self._next("batches", "ordinal", 1),
            next_commit=self._next("commits", "sequence", 1),
            closed={} if history else {RolloutState(state): count for state, count in closed},
        )

    def load_or_close(self) -> Snapshot:
        """The first load after `open`. Raises LedgerRefused, and closes, when its rows are damaged."""
        try:
            return self.load()
        except sqlite3.DatabaseError as error:
            self.close()
            raise unreadable(self._path, error) from error

    def evaluations(self, tag: str) -> tuple[EvaluationRecord, ...]:
        """The outcomes recorded under a tag, in order of rollout and attempt."""
        table = TABLES[EvaluationRecord]
        rows = self._database.execute(table.select("WHERE tag = ? ORDER BY rollout_id, attempt"), (tag,))
        return tuple(cast("EvaluationRecord", table.load(row)) for row in rows)

    def trajectories(self, keys: Sequence[tuple[RolloutId, int]]) -> list[Trajectory]:
        """The trajectories of these attempts, in order. Raises LedgerBroken when one is missing, CodecError."""
        return [self._trajectory(rollout_id, attempt) for rollout_id, attempt in keys]

    def drop_covered(self) -> tuple[int, ...]:
        """Delete trajectory files that neither an open group needs nor a return to any checkpoint directory that is
        still there; the numbers of those deleted. Without such a directory nothing is known, and nothing deleted."""
        sequence = self._oldest_retained()
        if sequence is None:
            return ()
        held = "SELECT DISTINCT trajectory_file FROM attempts WHERE trajectory_file IS NOT NULL"
        stored = {number for (number,) in self._database.execute(held)}
        needed = {number for (number,) in self._database.execute(_NEEDED_FILES, (sequence,))}
        return self._blobs.drop(stored - needed)

    def _oldest_retained(self) -> int | None:
        """The last step that the oldest checkpoint directory covers; None without one on the surviving path. Where they
        were when they were recorded says nothing: the run directory may have been moved since."""
        checkpoints = self._path.with_name("checkpoints")
        query = (
            "SELECT checkpoints.path, commits.sequence FROM checkpoints JOIN commits USING (chain) "
            "WHERE rolled_back_by IS NULL"
        )
        recorded = self._database.execute(query)
        retained = (sequence for path, sequence in recorded if (checkpoints / Path(path).name).is_dir())
        return min(retained, default=None)

    def backup(self, destination: Path) -> None:
        """A consistent copy of `ledger.db` (without trajectories) under its final name only when complete. Raises
        OSError."""
        staged = destination.with_name(destination.name + ".part")
        staged.unlink(missing_ok=True)
        with _as_oserror(staged), closing(sqlite3.connect(staged)) as copy:
            self._database.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        fsync(staged)
        staged.replace(destination)
        fsync(destination.parent)

    def export(self, folder: Path) -> None:
        """`ledger.db` and the trajectories, in memory or not, as files in `folder`. Raises OSError."""
        (folder / "trajectories").mkdir(parents=True, exist_ok=True)
        self.backup(folder / "ledger.db")
        self._blobs.export(folder / "trajectories")

    def close(self) -> None:
        """Release the files and the lock; idempotent."""
        self._database.close()
        self._blobs.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _trajectory(self, rollout_id: RolloutId, attempt: int) -> Trajectory:
        query = "SELECT trajectory_file FROM attempts WHERE rollout_id = ? AND attempt = ?"
        row = self._database.execute(query, (rollout_id, attempt)).fetchone()
        data = self._blobs.read(row[0], rollout_id, attempt) if row and row[0] else None
        if data is None:
            raise LedgerBroken(
                f"the trajectory of {rollout_id} attempt {attempt} is missing: run `headrace ledger verify`"
            )
        return decode(data)

    def _next(self, table: str, column: str, first: int) -> int:
        (highest,) = self._database.execute(f"SELECT max({column}) FROM {table}").fetchone()
        return first if highest is None else int(highest) + 1


class BlobFiles:
    """`trajectories/000001.db`, ...: the newest is written, older ones are only read. Without a directory: memory."""

    def __init__(self, directory: Path | None, file_bytes: int) -> None:
        self._directory, self._file_bytes = directory, file_bytes
        self._open: dict[int, sqlite3.Connection] = {}
        if directory is not None:
            directory.mkdir(exist_ok=True)
        numbers = [] if directory is None else [int(path.stem) for path in directory.glob("[0-9]*.db")]
        self._current = max(numbers, default=1)
        self._connection(self._current)

    def write(self, trajectories: Sequence[StoredTrajectory]) -> int:
        """Make blobs durable; returns the number of their file."""
        self._rotate()
        database = self._connection(self._current)
        with _transaction(database):
            database.executemany(
                "INSERT OR REPLACE INTO trajectories (rollout_id, attempt, data) VALUES (?, ?, ?)",
                [(stored.rollout_id, stored.attempt, encode(stored.trajectory)) for stored in trajectories],
            )
        return self._current

    def read(self, number: int, rollout_id: RolloutId, attempt: int) -> bytes | None:
        """The blob of an attempt in file `number`, None when it is not there."""
        if self._directory is not None and not self._path(number).exists():
            return None
        query = "SELECT data FROM trajectories WHERE rollout_id = ? AND attempt = ?"
        row = self._connection(number).execute(query, (rollout_id, attempt)).fetchone()
        return bytes(row[0]) if row else None

    def drop(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Delete these files, but for the newest; those that were there. Raises OSError."""
        if self._directory is None:
            return ()
        dropped = [number for number in sorted(numbers) if number < self._current and self._path(number).exists()]
        for number in dropped:
            if (database := self._open.pop(number, None)) is not None:
                database.close()
            # The database last: while it is there, what is left of the others belongs to it.
            for suffix in ("-wal", "-shm", ""):
                self._path(number).with_name(self._path(number).name + suffix).unlink(missing_ok=True)
        if dropped:
            fsync(self._directory)
        return tuple(dropped)

    def export(self, directory: Path) -> None:
        """Copies of all files."""
        numbers = range(1, self._current + 1)
        for number in numbers if self._directory is None else filter(lambda each: self._path(each).exists(), numbers):
            path = directory / f"{number:06d}.db"
            with _as_oserror(path), closing(sqlite3.connect(path)) as copy:
                self._connection(number).backup(copy)

    def close(self) -> None:
        for database in self._open.values():
            database.close()
        self._open.clear()

    def _path(self, number: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{number:06d}.db"

    def _rotate(self) -> None:
        if self._directory is not None and self._path(self._current).stat().st_size >= self._file_bytes:
            self._open.pop(self._current).close()
            self._current += 1

    def _connection(self, number: int) -> sqlite3.Connection:
        if number not in self._open:
            database = _connect(None if self._directory is None else self._path(number))
            with _transaction(database):
                database.execute(TRAJECTORIES_DDL)
            if self._directory is not None:
                fsync(self._directory)
            self._open[number] = database
        return self._open[number]


def _connect(path: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            database.execute(f"PRAGMA {pragma}")
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, identity: Mapping[str, str], path: Path) -> None:
    """Create the tables of a new ledger; check that an old one is ours, readable and of this run. Raises
    LedgerRefused."""
    try:
        _create_or_check(database, identity, path)
    except BaseException:
        database.close()
        raise


def _create_or_check(database: sqlite3.Connection, identity: Mapping[str, str], path: Path) -> None:
    (schema,) = database.execute("PRAGMA user_version").fetchone()
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not schema and not application and not tables:
        with _transaction(database):
            for statement in LEDGER_STATEMENTS:
                database.execute(statement)
            database.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", identity.items())
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return
    check_schema(schema, application, path)
    stored = dict(database.execute("SELECT key, value FROM meta"))
    for key, value in identity.items():
        if stored.get(key) != value:
            raise LedgerRefused(
                f"{path} was made with {key} = {stored.get(key)}, this run has {value}: "
                "resume with the same run and task file, or start a new run directory"
            )
    if schema < SCHEMA_VERSION:
        with _transaction(database):
            migrate(database, schema)


def unreadable(path: Path, error: sqlite3.DatabaseError) -> LedgerRefused:
    """Damaged: what to put in its place; the log of the damaged file must not be played into that. Anything else, as a
    full disk, is told as it is."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return LedgerRefused(f"{path} is not readable: {error}")
    return LedgerRefused(
        f"{path} is not readable: {error}: remove it with its -wal and -shm files, and put the newest copy in its "
        f"place, ledger.db of the newest directory in {path.parent / 'checkpoints'}"
    )


def check_schema(schema: int, application: int, path: Path) -> None:
    """Raises LedgerRefused unless the header is that of a ledger this headrace can read."""
    if application != APPLICATION_ID:
        raise LedgerRefused(f"{path} is a SQLite file of another program: choose another run directory")
    if schema < 1:
        raise LedgerRefused(f"{path} has no schema number: it is damaged, restore a copy")
    if schema > SCHEMA_VERSION:
        raise LedgerRefused(f"{path} has schema {schema}, this headrace reads up to {SCHEMA_VERSION}: upgrade headrace")


@contextmanager
def _as_oserror(path: Path) -> Iterator[None]:
    """A copy that cannot be written is the trouble of its disk, not of the ledger."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"the copy of the ledger cannot be written: {error}", str(path)) from error


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _lock(path: Path) -> int:
    """A lock held while the descriptor is open. Raises LedgerInUse."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LedgerInUse(f"{path.parent} is open in another process: end that run first") from None
    return descriptor
