"""Durable table of the runs of a cluster, one SQLite file in the state root of the control node.

The table is synchronous and has no clock. It may be used by one thread at a time.

Invariants:
- Only one process has a table open, ensured by a lock that the kernel releases when the process ends.
- Every change is durable, together with the event that describes it, when its method returns; when the method raises,
  nothing has changed.
- A submission that is repeated under its key returns the run that it created. Names are unique among an owner's live
  runs.
- Only the transitions in `records.TRANSITIONS` are made.
- A run's newest `EVENTS_KEPT` events are kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Self

import orjson

from headrace.actors.cluster.runs.records import (
    ENDED,
    RESUMABLE,
    TRANSITIONS,
    ActualState,
    Build,
    Caller,
    DesiredState,
    Recipe,
    RunEvent,
    RunId,
    RunRecord,
    Submission,
    run_record,
)
from headrace.actors.errors import ConfigError, RunRefused, RunUnknown, SubmissionConflict
from headrace.actors.runtime.actors.nodes import TABLE_FILE
from headrace.buffer.errors import LedgerInUse, LedgerRefused
from headrace.buffer.ledger.local_disk import filesystem_magic, refuse_full, refuse_network
from headrace.buffer.primitives.database import connect, stamp_of, transaction, write_stamp
from headrace.buffer.primitives.durable_files import fsync
from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.host.private_folders import make_missing

FILE_NAME: Final = TABLE_FILE
EVENTS_KEPT: Final = 1000
NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Names of runs and owners."""
_STAMP: Final = (0x48525254, 1)
"""`HRRT`, and the number of the schema: this SQLite file is a table of runs."""
_LONGEST_TEXT: Final = 2000
_DDL: Final = (
    """CREATE TABLE runs (
  run_id TEXT PRIMARY KEY, name TEXT NOT NULL, owner TEXT NOT NULL, idempotency_key TEXT NOT NULL,
  submitted_s REAL NOT NULL, position INTEGER NOT NULL UNIQUE, desired TEXT NOT NULL, actual TEXT NOT NULL,
  reason TEXT NOT NULL, exit_code INTEGER, restarts_left INTEGER NOT NULL, next_try_s REAL,
  config_digest TEXT NOT NULL, headrace_version TEXT NOT NULL, demands TEXT NOT NULL, names_code INTEGER NOT NULL,
  request_digest TEXT NOT NULL, recipe TEXT NOT NULL) STRICT""",
    "CREATE UNIQUE INDEX runs_by_key ON runs (owner, idempotency_key)",
    """CREATE TABLE events (
  run_id TEXT NOT NULL REFERENCES runs, number INTEGER NOT NULL, time_s REAL NOT NULL, state TEXT NOT NULL,
  text TEXT NOT NULL, PRIMARY KEY (run_id, number)) STRICT, WITHOUT ROWID""",
)
_VERBS: Final = {DesiredState.DRAINED: "drain", DesiredState.STOPPED: "stop", DesiredState.UPGRADED: "upgrade"}
_EFFECT: Final = {
    state: number
    for number, state in enumerate(
        (DesiredState.RUNNING, DesiredState.UPGRADED, DesiredState.DRAINED, DesiredState.STOPPED)
    )
}
"""Order of what users want: a wish only gives way to one with a larger effect."""
_COLUMNS: Final = tuple(field.name for field in fields(RunRecord))
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM runs"


class RunsTable:
    """An open table, made by `open` or `in_memory`; `close` it after use. A write that fails raises sqlite3.Error."""

    def __init__(self, database: sqlite3.Connection, lock: FileLock | None) -> None:
        self._database = database
        self._lock = lock

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open or create the table in `folder`. Raises LedgerRefused, and LedgerInUse if another process has it
        open."""
        path = folder / FILE_NAME
        try:
            make_missing(folder)
            refuse_network(folder, filesystem_magic(folder))
            refuse_full(folder, shutil.disk_usage(folder).free)
            lock = FileLock(path.with_suffix(".lock"), blocking=False, mode=0o600)
        except BlockingIOError as error:
            raise LedgerInUse(f"{path} is open in another process: a cluster has one table of runs") from error
        except OSError as error:
            raise LedgerRefused(
                f"{folder} is not writable ({error.strerror}): give the control node another state folder"
            ) from error
        try:
            # SQLite gives its side files the mode of the file itself.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            table = cls(_prepared(connect(path), path), lock)
            fsync(folder)
        except BaseException as error:
            lock.release()
            if isinstance(error, (sqlite3.DatabaseError, OSError)):
                raise LedgerRefused(f"{path} cannot be read ({error}): restore it, or move it away") from error
            raise
        return table

    @classmethod
    def in_memory(cls) -> Self:
        """Create a table without a file."""
        return cls(_prepared(connect(None), None), None)

    def close(self) -> None:
        """Close the file and release its lock; idempotent."""
        self._database.close()
        if self._lock is not None:
            self._lock.release()

    def submit(self, submission: Submission, build: Build, *, run_id: RunId, now_s: float, caller: Caller) -> RunRecord:
        """Add a run, which waits; return the existing one if the submission was made before.

        Raises SubmissionConflict if the key was used for another request, RunRefused if the owner has a live run of
        this name, and ConfigError for an invalid name, owner or key."""
        _check_names(submission)
        recipe = orjson.dumps(submission.recipe, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(orjson.dumps([submission.name]) + recipe).hexdigest()
        with transaction(self._database):
            if (earlier := self._submitted(submission, digest)) is not None:
                return earlier
            self._refuse_taken_name(submission.owner, submission.name)
            record = RunRecord(
                run_id=run_id,
                name=submission.name,
                owner=submission.owner,
                idempotency_key=submission.idempotency_key,
                submitted_s=now_s,
                position=self._next_position(),
                restarts_left=build.restarts,
                config_digest=build.config_digest,
                headrace_version=build.headrace_version,
                demands=build.demands,
                names_code=caller.may_name_code,
            )
            row = (*_row(record), digest, recipe.decode())
            self._database.execute(
                f"INSERT INTO runs ({', '.join(_COLUMNS)}, request_digest, recipe) VALUES ({_marks(len(row))})", row
            )
            self._append_event(record, f"submitted by {caller}", now_s)
        return record

    def _submitted(self, submission: Submission, digest: str) -> RunRecord | None:
        key = (submission.owner, submission.idempotency_key)
        found = self._database.execute(
            "SELECT run_id, request_digest FROM runs WHERE owner = ? AND idempotency_key = ?", key
        ).fetchone()
        if found is None:
            return None
        if found[1] != digest:
            raise SubmissionConflict(
                f"the idempotency key {submission.idempotency_key!r} belongs to another request (run {found[0]}): use "
                "a new key for a new run"
            )
        return self.get(found[0])

    def _refuse_taken_name(self, owner: str, name: str) -> None:
        for record in self.runs(owner):
            if record.name == name and record.is_live:
                raise RunRefused(
                    f"run {record.run_id} of {owner} has the name {name} and is {record.actual}: choose another name, "
                    "or wait until that run has ended"
                )

    def _next_position(self) -> int:
        return int(self._database.execute("SELECT coalesce(max(position), 0) + 1 FROM runs").fetchone()[0])

    def get(self, run_id: str) -> RunRecord:
        """Return a run. Raises RunUnknown."""
        row = self._database.execute(f"{_SELECT} WHERE run_id = ?", (run_id,)).fetchone()
        if row is None:
            raise RunUnknown(f"there is no run {run_id}: list the runs with `headrace status --url URL`")
        return _record(row)

    def runs(self, owner: str | None = None) -> tuple[RunRecord, ...]:
        """Return the runs of an owner, or all runs, in the order of the queue."""
        where, values = ("", ()) if owner is None else ("WHERE owner = ?", (owner,))
        return tuple(_record(row) for row in self._database.execute(f"{_SELECT} {where} ORDER BY position", values))

    def recipe(self, run_id: str) -> Recipe:
        """Return the recipe of a run. Raises RunUnknown."""
        row = self._database.execute("SELECT recipe FROM runs WHERE run_id = ?", (self.get(run_id).run_id,)).fetchone()
        recipe: Recipe = orjson.loads(row[0])
        return recipe

    def want(self, run_id: str, desired: DesiredState, *, now_s: float, caller: Caller) -> RunRecord:
        """Record that a user wants the run to be drained, stopped or upgraded. A run that waits ends at once; for an
        ended run this changes nothing. Raises RunUnknown, and RunRefused for a drain of a run that is being stopped and
        an upgrade of one that is being drained or stopped."""
        if desired not in _VERBS:
            raise ValueError("a run is resumed with `requeue`")
        with transaction(self._database):
            record = self.get(run_id)
            if not record.is_live or record.desired is desired:
                return record
            if _EFFECT[desired] < _EFFECT[record.desired]:
                raise RunRefused(
                    f"run {run_id} is to be {record.desired} and cannot be {desired} any more: wait until it has ended"
                )
            changed = replace(record, desired=desired)
            if record.actual is ActualState.WAITING:
                changed = replace(changed, actual=ActualState(desired), reason="", next_try_s=None)
            return self._save(changed, f"{_VERBS[desired]} requested by {caller}", now_s)

    def move(
        self,
        run_id: str,
        actual: ActualState,
        *,
        now_s: float,
        reason: str = "",
        exit_code: int | None = None,
        next_try_s: float | None = None,
        uses_restart: bool = False,
    ) -> RunRecord:
        """Record the next state of a run, with the `reason` for it, the `exit_code` if it ended, and the time of the
        next try if it waits for one, which may use up one of its restarts. A run that shall not run ends instead of
        waiting. Raises RunUnknown, and RunRefused for a transition that is not allowed or without restarts left."""
        with transaction(self._database):
            record = self.get(run_id)
            if actual not in TRANSITIONS[record.actual]:
                raise RunRefused(f"run {run_id} is {record.actual}, so it cannot become {actual}")
            if actual is ActualState.WAITING and record.desired in (DesiredState.DRAINED, DesiredState.STOPPED):
                # Its service was lost while it drained or stopped.
                actual, uses_restart = ActualState(record.desired), False
            if uses_restart and not record.restarts_left:
                raise RunRefused(f"run {run_id} has no restarts left, so it can only fail")
            reason = _one_line(reason)
            changed = replace(
                record,
                actual=actual,
                reason=reason,
                exit_code=exit_code if actual in ENDED else None,
                restarts_left=record.restarts_left - uses_restart,
                next_try_s=next_try_s if actual is ActualState.WAITING else None,
            )
            return self._save(changed, reason or str(actual), now_s)

    def requeue(
        self,
        run_id: str,
        build: Build,
        *,
        now_s: float,
        caller: Caller,
        recipe: Recipe | None = None,
    ) -> RunRecord:
        """Put an ended run at the end of the queue, with a new build and, if keys were changed, a new recipe. Raises
        RunUnknown, and RunRefused if the run is live, finished, or another live run has its name."""
        with transaction(self._database):
            record = self.get(run_id)
            if record.actual not in RESUMABLE:
                fix = "it has nothing left to do" if record.actual is ActualState.FINISHED else "drain or stop it first"
                raise RunRefused(f"run {run_id} is {record.actual} and cannot be resumed: {fix}")
            self._refuse_taken_name(record.owner, record.name)
            if recipe is not None:
                self._database.execute(
                    "UPDATE runs SET recipe = ? WHERE run_id = ?",
                    (orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS).decode(), run_id),
                )
            changed = replace(
                record,
                position=self._next_position(),
                desired=DesiredState.RUNNING,
                actual=ActualState.WAITING,
                reason="",
                exit_code=None,
                restarts_left=build.restarts,
                next_try_s=None,
                config_digest=build.config_digest,
                headrace_version=build.headrace_version,
                demands=build.demands,
                # Without a change, the recipe is that of another caller.
                names_code=record.names_code if recipe is None else caller.may_name_code,
            )
            return self._save(changed, f"resumed by {caller}", now_s)

    def renew(self, run_id: str, build: Build, *, now_s: float) -> RunRecord:
        """Let a live run whose service has ended, or that has none yet, start with another build. It keeps its place in
        the queue, and its share of the quota if it has one. Raises RunUnknown, and RunRefused if the run has ended."""
        with transaction(self._database):
            record = self.get(run_id)
            if not record.is_live:
                raise RunRefused(f"run {run_id} is {record.actual}: resume it, and it starts under what is installed")
            had_service = record.actual is not ActualState.WAITING
            changed = replace(
                record,
                desired=DesiredState.RUNNING,
                actual=ActualState.WAITING,
                reason="",
                restarts_left=build.restarts,
                next_try_s=now_s if had_service else record.next_try_s,
                config_digest=build.config_digest,
                headrace_version=build.headrace_version,
                demands=build.demands,
            )
            return self._save(changed, f"starts under headrace {build.headrace_version}", now_s)

    def explain(self, run_id: str, reason: str, *, now_s: float) -> RunRecord:
        """Record why a run is in its state. An unchanged reason changes nothing. Raises RunUnknown."""
        with transaction(self._database):
            record = self.get(run_id)
            reason = _one_line(reason)
            if reason == record.reason:
                return record
            return self._save(replace(record, reason=reason), reason or str(record.actual), now_s)

    def note(self, run_id: str, text: str, *, now_s: float) -> RunEvent:
        """Append an event that changes nothing else, such as the loss of a node. Raises RunUnknown."""
        with transaction(self._database):
            return self._append_event(self.get(run_id), _one_line(text), now_s)

    def events(self, run_id: str, *, after: int = 0) -> tuple[RunEvent, ...]:
        """Return the events that are kept and have a number above `after`, oldest first. Raises RunUnknown."""
        rows = self._database.execute(
            "SELECT number, time_s, state, text FROM events WHERE run_id = ? AND number > ? ORDER BY number",
            (self.get(run_id).run_id, after),
        )
        return tuple(
            RunEvent(number=number, time_s=time_s, state=ActualState(state), text=text)
            for number, time_s, state, text in rows
        )

    def _save(self, record: RunRecord, text: str, now_s: float) -> RunRecord:
        assignments = ", ".join(f"{name} = ?" for name in _COLUMNS)
        self._database.execute(f"UPDATE runs SET {assignments} WHERE run_id = ?", (*_row(record), record.run_id))
        self._append_event(record, text, now_s)
        return record

    def _append_event(self, record: RunRecord, text: str, now_s: float) -> RunEvent:
        execute = self._database.execute
        newest = execute("SELECT max(number) FROM events WHERE run_id = ?", (record.run_id,)).fetchone()[0]
        event = RunEvent(number=(newest or 0) + 1, time_s=now_s, state=record.actual, text=text)
        execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            (record.run_id, event.number, event.time_s, event.state.value, event.text),
        )
        execute("DELETE FROM events WHERE run_id = ? AND number <= ?", (record.run_id, event.number - EVENTS_KEPT))
        return event


def _prepared(database: sqlite3.Connection, path: Path | None) -> sqlite3.Connection:
    """Create the tables of a new file, and check that an existing one is a table of runs of this schema. Raises
    LedgerRefused."""
    try:
        stamp = stamp_of(database)
        if stamp == (0, 0):
            with transaction(database):
                for statement in _DDL:
                    database.execute(statement)
                write_stamp(database, _STAMP)
        elif stamp != _STAMP:
            raise LedgerRefused(
                f"{path} is of an unreleased version of headrace, or of another program: move the file away"
            )
    except BaseException:
        database.close()
        raise
    return database


def _check_names(submission: Submission) -> None:
    for what, value in (("name", submission.name), ("owner", submission.owner)):
        if not NAME.fullmatch(value):
            raise ConfigError(
                f"{what} {value!r}: use 1 to 128 letters, digits, '.', '_' and '-', not starting with '.'"
            )
    key = submission.idempotency_key
    if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise ConfigError("the idempotency key must have 1 to 255 printable ASCII characters, such as a UUID")


def _one_line(text: str) -> str:
    """Return the text on one line, without what SQLite or JSON cannot store, and cut at `_LONGEST_TEXT` characters."""
    line = " ".join(text.encode(errors="replace").decode().replace("\0", " ").split())
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 3]}..."


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _row(record: RunRecord) -> tuple[Any, ...]:
    values = {name: getattr(record, name) for name in _COLUMNS}
    values["desired"], values["actual"] = record.desired.value, record.actual.value
    values["demands"] = orjson.dumps(record.demands).decode()
    return tuple(values.values())


def _record(row: tuple[Any, ...]) -> RunRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    return run_record({**values, "demands": orjson.loads(values["demands"])})
