"""The ledger on disk: `<run>/ledger.db` and the trajectories beside it. Synchronous, for one thread.

Invariants:
- Only one process has a ledger open for writing (`ledger.lock`).
- When `write` returns, all its arguments are on disk; when it raises, none of them is visible in the ledger.
- A trajectory is on disk before the row that refers to it. A crash between the two leaves a blob without a row, which
  is harmless.
- Trajectory files rotate by size; `drop_covered` deletes whole files that no retained checkpoint needs any more.
"""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from headrace.buffer.core.records import OUTAGES_KEPT, EvaluationRecord, Record, RolloutState, Snapshot
from headrace.buffer.errors import LedgerBroken, LedgerDiskFull, LedgerInUse, LedgerRefused
from headrace.buffer.ledger.archive import (
    ARCHIVE,
    EVALUATIONS,
    SKIPPED,
    STEPS,
    Archive,
    closed_rollouts,
    next_numbers,
    totals_of,
)
from headrace.buffer.ledger.local_disk import filesystem_magic, refuse_full, refuse_network
from headrace.buffer.ledger.schema import LEDGER_STATEMENTS, STAMP, TABLES, TRAJECTORIES_DDL
from headrace.buffer.primitives.database import connect, stamp_of, transaction, write_stamp
from headrace.buffer.primitives.durable_files import fsync
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.trajectories.codec import decode, encode
from headrace.buffer.trajectories.types import RolloutId, Trajectory
from headrace.buffer.trajectories.versions import PolicyVersion

TRAJECTORY_FILE_BYTES = 256 << 20
SOURCES = "sources"
"""Key of the table `meta` with the names and shares of the run's sources of tasks, as JSON; only in runs that have
some."""
_NEEDED_FILES = """
SELECT DISTINCT attempts.trajectory_file FROM attempts
JOIN rollouts ON rollouts.rollout_id = attempts.rollout_id AND rollouts.attempt = attempts.attempt
JOIN groups USING (group_id)
LEFT JOIN commits ON commits.batch_id = rollouts.batch_id AND commits.rolled_back_by IS NULL
WHERE attempts.trajectory_file IS NOT NULL AND (groups.closed = 0 OR commits.sequence > ?)
UNION SELECT number FROM trajectory_files WHERE last_sequence > ?
"""
"""Files with a trajectory that may still be trained, or may be trained again after a return to the given step."""
_NEWEST_OUTAGES = f"WHERE number > (SELECT coalesce(max(number), 0) FROM outages) - {OUTAGES_KEPT} ORDER BY number"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory to be written, with its attempt."""

    rollout_id: RolloutId
    attempt: int
    trajectory: Trajectory


class Ledger:
    """Ledger of one run, opened with `open` or `in_memory` and closed with `close`. After `write` has failed, the
    ledger must not be used any more."""

    def __init__(self, database: sqlite3.Connection, blobs: BlobFiles, lock: FileLock | None, path: Path) -> None:
        self._database, self._blobs, self._lock, self._path = database, blobs, lock, path
        self._archive = Archive(database, None if lock is None else path.with_name(ARCHIVE))

    @classmethod
    def open(
        cls, run_dir: Path, identity: Mapping[str, str], *, trajectory_file_bytes: int = TRAJECTORY_FILE_BYTES
    ) -> Self:
        """Open or create the ledger of a run. `identity` (run id, tasks) must be the one with which it was created.

        Raises LedgerRefused, LedgerInUse."""
        path, archive = run_dir / "ledger.db", run_dir / ARCHIVE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_network(run_dir, filesystem_magic(run_dir))
            refuse_full(run_dir, shutil.disk_usage(run_dir).free)
            lock = FileLock(run_dir / "ledger.lock", blocking=False, mode=0o644)
        except BlockingIOError:
            raise LedgerInUse(f"{run_dir} is open in another process: end that run first") from None
        except OSError as error:
            raise LedgerRefused(
                f"{run_dir} is not writable: {error.strerror}: choose a run directory on a writable disk"
            ) from error
        try:
            if archive.exists() and not (path.exists() and path.stat().st_size):
                # A new ledger would empty the archive of the lost one.
                raise LedgerRefused(
                    f"{path} is missing or empty, but there is {archive}: restore the ledger, "
                    f"from its newest copy: {newest_copy_of(path)}"
                )
            database = connect(path)
            _prepare(database, identity, path)
            blobs = BlobFiles(run_dir / "trajectories", trajectory_file_bytes)
            fsync(run_dir)
            return cls(database, blobs, lock, path)
        except BaseException as error:
            lock.release()
            if isinstance(error, sqlite3.DatabaseError):
                raise unreadable(path, error) from error
            raise

    @classmethod
    def in_memory(cls, identity: Mapping[str, str]) -> Self:
        """Create a ledger without files, for virtual time."""
        database = connect(None)
        _prepare(database, identity, Path(":memory:"))
        return cls(database, BlobFiles(None, TRAJECTORY_FILE_BYTES), None, Path(":memory:"))

    def write(self, changes: Sequence[Record], trajectories: Sequence[StoredTrajectory]) -> None:
        """Make changed records and new trajectories durable. Raises sqlite3.Error, OSError, CodecError."""
        file_number = self._blobs.write(trajectories) if trajectories else None
        with transaction(self._database):
            for kind, table in TABLES.items():
                rows = [table.row(record) for record in changes if type(record) is kind]
                if rows:
                    self._database.executemany(table.upsert(), rows)
            self._database.executemany(
                "UPDATE attempts SET trajectory_file = ? WHERE rollout_id = ? AND attempt = ?",
                [(file_number, stored.rollout_id, stored.attempt) for stored in trajectories],
            )

    def load(self) -> Snapshot:
        """Read the rows from which a core is folded, and the totals of the other rows."""
        open_groups = "group_id IN (SELECT group_id FROM groups WHERE closed = 0)"
        wheres = {
            "groups": "WHERE closed = 0",
            "rollouts": f"WHERE {open_groups}",
            "attempts": (
                f"WHERE (rollout_id, attempt) IN (SELECT rollout_id, attempt FROM rollouts WHERE {open_groups})"
            ),
            "batches": "WHERE closed = 0",
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
        totals = totals_of(self._database)
        closed = Counter(closed_rollouts(totals))
        # Groups that were closed, but not archived before the last process ended.
        states = self._database.execute(f"SELECT state, count(*) FROM rollouts WHERE NOT {open_groups} GROUP BY state")
        closed.update({RolloutState(state): count for state, count in states})
        return Snapshot(
            records=tuple(records),
            evaluations=frozenset((RolloutId(rollout_id), attempt) for rollout_id, attempt in evaluations),
            closed=closed,
            steps_closed=totals.get(STEPS, 0),
            steps_closed_skipped=totals.get(SKIPPED, 0),
            evaluations_closed=totals.get(EVALUATIONS, 0),
            **next_numbers(self._database),
        )

    def load_or_close(self) -> Snapshot:
        """Perform the first load after `open`. Closes the ledger and raises LedgerRefused when its rows are damaged."""
        try:
            return self.load()
        except sqlite3.DatabaseError as error:
            self.close()
            raise unreadable(self._path, error) from error

    def evaluations(self, tag: str) -> tuple[EvaluationRecord, ...]:
        """Return the outcomes recorded under a tag, in order of rollout and attempt."""
        table = TABLES[EvaluationRecord]
        records = [cast("EvaluationRecord", table.load(row)) for row in self._archive.evaluations(tag)]
        # The ledger's rows come first, and override those of the archive.
        by_key = {record.key: record for record in reversed(records)}
        return tuple(by_key[key] for key in sorted(by_key))

    def end_evaluation(self, tag: str, step: int, summary: Mapping[str, object], now: float) -> None:
        """End the evaluation with this tag: nothing more will be recorded under it. Idempotent."""
        with transaction(self._database):
            self._database.execute(
                "INSERT OR IGNORE INTO ended_evaluations (tag, step, summary, recorded_at_s) VALUES (?, ?, ?, ?)",
                (tag, step, json.dumps(summary), now),
            )

    def ended_evaluations(self) -> dict[str, float | None]:
        """Return the success rates of evaluations that have ended, by tag."""
        return self._archive.ended_evaluations()

    def archive_groups(self) -> bool:
        """Move some closed groups to the archive. Return False when there were none left to move. Raises sqlite3.Error,
        OSError."""
        return self._archive.move_groups()

    def archive_steps(self) -> tuple[int, list[PolicyVersion]]:
        """Move covered steps to the archive. Return the first step that stays, and the checkpoints that were moved.
        Raises sqlite3.Error, OSError."""
        first, versions = self._archive.move_steps()
        return first, [PolicyVersion.parse(version) for version in versions]

    def archive_evaluations(self) -> list[tuple[RolloutId, int]]:
        """Move the results of ended evaluations to the archive; return their rollouts and attempts. Raises
        sqlite3.Error, OSError."""
        return self._archive.move_evaluations()

    def archive_lacks(self, chain: str) -> bool:
        """Return whether a return to the step with this hash chain undoes rows that `recall` cannot bring back."""
        return self._archive.lacks(chain)

    def recall(self, chain: str) -> None:
        """Bring back and reopen the rows that a return to the step with this hash chain undoes, if such a step
        exists."""
        sequence = self._archive.sequence_of(chain)
        if sequence is not None:
            self._archive.recall(sequence)

    def recall_groups_of(self, rollouts: Iterable[RolloutId]) -> None:
        """Bring back and reopen the groups of these rollouts, closed or not."""
        self._archive.recall_groups_of(rollouts)

    def trajectories(self, keys: Sequence[tuple[RolloutId, int]]) -> list[Trajectory]:
        """Read the trajectories of these attempts, in order. Raises LedgerBroken when one is missing, and
        CodecError when one is damaged."""
        query, found = "SELECT trajectory_file FROM attempts WHERE rollout_id = ? AND attempt = ?", []
        for rollout_id, attempt in keys:
            row = self._database.execute(query, (rollout_id, attempt)).fetchone()
            data = self._blobs.read(row[0], rollout_id, attempt) if row and row[0] else None
            if data is None:
                raise LedgerBroken(
                    f"the trajectory of {rollout_id} attempt {attempt} is missing: run `headrace ledger verify`"
                )
            found.append(decode(data))
        return found

    def drop_covered(self, checkpoints: Collection[str] | None = None) -> tuple[int, ...]:
        """Delete the trajectory files that are needed neither by an open group nor to resume from any checkpoint
        directory that still exists. Return the numbers of the deleted files. If there is no checkpoint directory,
        nothing is deleted. `checkpoints` are the names of the directories; by default, those beside the ledger."""
        names = checkpoints
        if names is None:
            # Recorded paths are not used: the run directory may have been moved since.
            folder = self._path.with_name("checkpoints")
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        steps = [step for name in names if (step := self._archive.checkpoint_step(name)) is not None]
        if not steps:
            return ()
        oldest = min(steps)
        held = (
            "SELECT trajectory_file FROM attempts WHERE trajectory_file IS NOT NULL "
            "UNION SELECT number FROM trajectory_files"
        )
        stored = {number for (number,) in self._database.execute(held)}
        needed = {number for (number,) in self._database.execute(_NEEDED_FILES, (oldest, oldest))}
        dropped = self._blobs.drop(stored - needed)
        with transaction(self._database):
            self._database.executemany("DELETE FROM trajectory_files WHERE number = ?", [(one,) for one in dropped])
        return dropped

    def backup(self, destination: Path) -> None:
        """Copy `ledger.db` consistently, without trajectories; the copy gets its final name only when complete. Raises
        OSError."""
        staged = destination.with_name(destination.name + ".part")
        staged.unlink(missing_ok=True)
        path = ":memory:" if self._lock is None else self._path
        with _as_oserror(staged), closing(sqlite3.connect(path, isolation_level=None)) as reader:
            if self._lock is None:
                self._database.backup(reader)
            # VACUUM reads a snapshot of its own, so that writes can continue, and leaves no free pages in the copy.
            reader.execute("VACUUM INTO ?", (str(staged),))
        fsync(staged)
        staged.replace(destination)
        fsync(destination.parent)

    def export(self, folder: Path) -> None:
        """Copy `ledger.db` and the trajectories, even those held in memory, to files in `folder`. Raises OSError."""
        (folder / "trajectories").mkdir(parents=True, exist_ok=True)
        self.backup(folder / "ledger.db")
        with _as_oserror(folder / ARCHIVE):
            self._archive.export(folder / ARCHIVE)
        self._blobs.export(folder / "trajectories")

    def close(self) -> None:
        """Release the files and the lock; idempotent."""
        self._archive.close()
        self._database.close()
        self._blobs.close()
        if self._lock is not None:
            self._lock.release()


class BlobFiles:
    """Trajectory files `trajectories/000001.db`, ...: only the newest is written to. If `directory` is None, they are
    kept in memory."""

    def __init__(self, directory: Path | None, file_bytes: int) -> None:
        self._directory, self._file_bytes = directory, file_bytes
        self._open: dict[int, sqlite3.Connection] = {}
        if directory is not None:
            directory.mkdir(exist_ok=True)
        # A copy made by hand, such as `000001 (1).db`, is ignored.
        paths = [] if directory is None else [path for path in directory.glob("*.db") if path.stem.isdecimal()]
        self._current = max((int(path.stem) for path in paths), default=1)
        try:
            self._connection(self._current)
        except sqlite3.DatabaseError as error:
            raise LedgerRefused(
                f"{self._path(self._current)} is not readable: {error}: put a copy of it back, or remove it with its "
                "-wal and -shm files and issue the lost rollouts again with `headrace ledger repair RUN --retry-lost`"
            ) from error

    def write(self, trajectories: Sequence[StoredTrajectory]) -> int:
        """Make blobs durable. Return the number of the file they were written to."""
        if self._directory is not None and self._path(self._current).stat().st_size >= self._file_bytes:
            self._open.pop(self._current).close()
            self._current += 1
        database = self._connection(self._current)
        with transaction(database):
            database.executemany(
                "INSERT OR REPLACE INTO trajectories (rollout_id, attempt, data) VALUES (?, ?, ?)",
                [(stored.rollout_id, stored.attempt, encode(stored.trajectory)) for stored in trajectories],
            )
        return self._current

    def read(self, number: int, rollout_id: RolloutId, attempt: int) -> bytes | None:
        """Return the blob of an attempt in file `number`; None when it is not there."""
        if self._directory is not None and not self._path(number).exists():
            return None
        query = "SELECT data FROM trajectories WHERE rollout_id = ? AND attempt = ?"
        row = self._connection(number).execute(query, (rollout_id, attempt)).fetchone()
        return bytes(row[0]) if row else None

    def drop(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Delete the files with these numbers, except the newest; return the numbers of those that existed. Raises
        OSError."""
        if self._directory is None:
            return ()
        dropped = [number for number in sorted(numbers) if number < self._current and self._path(number).exists()]
        for number in dropped:
            if (database := self._open.pop(number, None)) is not None:
                database.close()
            # The database last: while it exists, its log and index belong to it.
            for suffix in ("-wal", "-shm", ""):
                self._path(number).with_name(self._path(number).name + suffix).unlink(missing_ok=True)
        if dropped:
            fsync(self._directory)
        return tuple(dropped)

    def export(self, directory: Path) -> None:
        """Copy all files."""
        numbers = range(1, self._current + 1)
        for number in numbers if self._directory is None else filter(lambda each: self._path(each).exists(), numbers):
            path = directory / f"{number:06d}.db"
            with _as_oserror(path), closing(sqlite3.connect(path)) as copy:
                self._connection(number).backup(copy)

    def close(self) -> None:
        """Close all files; idempotent."""
        for database in self._open.values():
            database.close()
        self._open.clear()

    def _path(self, number: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{number:06d}.db"

    def _connection(self, number: int) -> sqlite3.Connection:
        if number not in self._open:
            database = connect(None if self._directory is None else self._path(number))
            with transaction(database):
                database.execute(TRAJECTORIES_DDL)
            if self._directory is not None:
                fsync(self._directory)
            self._open[number] = database
        return self._open[number]


def _prepare(database: sqlite3.Connection, identity: Mapping[str, str], path: Path) -> None:
    """Create the tables of a new ledger, or check that an existing file is a readable ledger of this run. Closes the
    database on errors. Raises LedgerRefused."""
    try:
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if stamp_of(database) == (0, 0) and not tables:
            with transaction(database):
                for statement in LEDGER_STATEMENTS:
                    database.execute(statement)
                database.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", identity.items())
                database.executemany("INSERT INTO totals (name, value) VALUES (?, ?)", next_numbers(database).items())
                write_stamp(database, STAMP)
            return
        check_stamp(database, path)
        stored = dict(database.execute("SELECT key, value FROM meta"))
        for key, value in identity.items():
            if stored.get(key) != value:
                raise LedgerRefused(
                    f"{path} was made with {key} = {stored.get(key)}, but this run has {value}: "
                    "resume with the same run and task file, or start a new run directory"
                )
    except BaseException:
        database.close()
        raise


def unreadable(path: Path, error: sqlite3.DatabaseError) -> LedgerRefused:
    """Return the error for an unreadable ledger. For a damaged file it names the copy to restore; the log of the
    damaged file must be removed first, since SQLite would apply it to the copy."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return LedgerDiskFull(f"{path} cannot be opened: {error}: free some space, then resume the run")
    if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return LedgerRefused(f"{path} is not readable: {error}")
    return LedgerRefused(
        f"{path} is not readable: {error}: remove it with its -wal and -shm files, and put the newest copy in its "
        f"place: {newest_copy_of(path)}"
    )


def newest_copy_of(path: Path) -> str:
    """Return where the newest copy of the ledger at `path` is, as the end of an error message."""
    checkpoints = path.with_name("checkpoints")
    if checkpoints.is_symlink():
        # With storage elsewhere the copies are there, with their trajectories.
        folder = checkpoints.readlink().parent / "ledger"
        return f"it is in {folder}; restore it to an empty folder with `headrace resume --from-storage`"
    return f"ledger.db of the newest directory in {checkpoints}"


def check_stamp(database: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerRefused unless the database is a ledger that this version of headrace can read."""
    if stamp_of(database) != STAMP:
        raise LedgerRefused(
            f"{path} is of an unreleased version of headrace, or of another program: start a new run in another "
            "directory"
        )


@contextmanager
def _as_oserror(path: Path) -> Iterator[None]:
    """Raise errors during a copy as OSError, because they concern the destination disk, not the ledger."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"the copy of the ledger cannot be written: {error}", str(path)) from error
