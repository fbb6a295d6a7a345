"""Durable table of the runs of a cluster, one file of tables in the state root of the control node.

The table is synchronous and has no clock. It may be used by one thread at a time.

Invariants:
- Every change is durable, together with the event that describes it, when its method returns; when the method raises,
  nothing has changed.
- A submission that is repeated under its key returns the run that it created. Names are unique among an owner's live
  runs.
- Only the transitions in `records.TRANSITIONS` are made.
- A run's newest `EVENTS_KEPT` events are kept.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

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
)
from headrace.actors.errors import ConfigError, RunRefused, RunUnknown, SubmissionConflict
from headrace.actors.runtime.actors.nodes import TABLE_FILE
from headrace.buffer.errors import LedgerInUse, LedgerRefused
from headrace.buffer.ledger.local_disk import filesystem_magic, refuse_full, refuse_network
from headrace.buffer.primitives.tables import TableError, TableFile, TableInUse
from headrace.sandboxes.host.private_folders import make_missing

FILE_NAME: Final = TABLE_FILE
EVENTS_KEPT: Final = 1000
NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Names of runs and owners."""
_STAMP: Final = (0x48525254, 2)
"""`HRRT`, and the number of the schema: these tables are of the runs of a cluster."""
_LONGEST_TEXT: Final = 2000
_VERBS: Final = {DesiredState.DRAINED: "drain", DesiredState.STOPPED: "stop", DesiredState.UPGRADED: "upgrade"}
_EFFECT: Final = {
    state: number
    for number, state in enumerate(
        (DesiredState.RUNNING, DesiredState.UPGRADED, DesiredState.DRAINED, DesiredState.STOPPED)
    )
}
"""Order of what users want: a wish only gives way to one with a larger effect."""


@dataclass(frozen=True, slots=True)
class _Request:
    """The request that created a run, by its digest, and the run's recipe, which a resume may change."""

    run_id: str
    digest: str
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class _StoredEvent:
    run_id: str
    number: int
    event: RunEvent


class RunsTable:
    """An open table, made by `open` or `in_memory`; `close` it after use. Every method raises TableError if the file
    cannot be read or written."""

    def __init__(self, file: TableFile) -> None:
        self._file = file
        self._runs = file.table("runs", RunRecord, "run_id")
        self._requests = file.table("requests", _Request, "run_id")
        self._events = file.table("events", _StoredEvent, "run_id", "number")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open or create the table in `folder`. Raises LedgerRefused, and LedgerInUse if another process has it
        open."""
        path = folder / FILE_NAME
        try:
            make_missing(folder)
            refuse_network(folder, filesystem_magic(folder))
            refuse_full(folder, shutil.disk_usage(folder).free)
            return cls(TableFile(path, _STAMP, durable=True))
        except TableInUse as error:
            raise LedgerInUse(f"{path} is open in another process: a cluster has one table of runs") from error
        except TableError as error:
            raise LedgerRefused(str(error)) from error
        except OSError as error:
            raise LedgerRefused(
                f"{folder} is not writable ({error.strerror}): give the control node another state folder"
            ) from error

    @classmethod
    def in_memory(cls) -> Self:
        """Create a table without a file."""
        return cls(TableFile(None, _STAMP))

    def close(self) -> None:
        """Close the file and release its lock; idempotent."""
        self._file.close()

    def submit(self, submission: Submission, build: Build, *, run_id: RunId, now_s: float, caller: Caller) -> RunRecord:
        """Add a run, which waits; return the existing one if the submission was made before.

        Raises SubmissionConflict if the key was used for another request, RunRefused if the owner has a live run of
        this name, and ConfigError for an invalid name, owner or key."""
        _check_names(submission)
        recipe = orjson.dumps(submission.recipe, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(orjson.dumps([submission.name]) + recipe).hexdigest()
        with self._file.transaction():
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
            self._requests.put(_Request(run_id, digest, submission.recipe))
            return self._save(record, f"submitted by {caller}", now_s)

    def _submitted(self, submission: Submission, digest: str) -> RunRecord | None:
        key = submission.idempotency_key
        found = next((run for run in self.runs(submission.owner) if run.idempotency_key == key), None)
        if found is not None and self._request(found.run_id).digest != digest:
            raise SubmissionConflict(
                f"the idempotency key {key!r} belongs to another request (run {found.run_id}): use a new key for a new "
                "run"
            )
        return found

    def _refuse_taken_name(self, owner: str, name: str) -> None:
        for record in self.runs(owner):
            if record.name == name and record.is_live:
                raise RunRefused(
                    f"run {record.run_id} of {owner} has the name {name} and is {record.actual}: choose another name, "
                    "or wait until that run has ended"
                )

    def _next_position(self) -> int:
        return 1 + max((run.position for run in self._runs.all()), default=0)

    def get(self, run_id: str) -> RunRecord:
        """Return a run. Raises RunUnknown."""
        record = self._runs.get(run_id)
        if record is None:
            raise RunUnknown(f"there is no run {run_id}: list the runs with `headrace status --url URL`")
        return record

    def runs(self, owner: str | None = None) -> tuple[RunRecord, ...]:
        """Return the runs of an owner, or all runs, in the order of the queue."""
        found = (run for run in self._runs.all() if owner in (None, run.owner))
        return tuple(sorted(found, key=lambda run: run.position))

    def recipe(self, run_id: str) -> Recipe:
        """Return the recipe of a run. Raises RunUnknown."""
        return self._request(self.get(run_id).run_id).recipe

    def _request(self, run_id: str) -> _Request:
        request = self._requests.get(run_id)
        assert request is not None, "it is stored with its run"
        return request

    def want(self, run_id: str, desired: DesiredState, *, now_s: float, caller: Caller) -> RunRecord:
        """Record that a user wants the run to be drained, stopped or upgraded. A run that waits ends at once; for an
        ended run this changes nothing. Raises RunUnknown, and RunRefused for a drain of a run that is being stopped and
        an upgrade of one that is being drained or stopped."""
        if desired not in _VERBS:
            raise ValueError("a run is resumed with `requeue`")
        with self._file.transaction():
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
        with self._file.transaction():
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
        with self._file.transaction():
            record = self.get(run_id)
            if record.actual not in RESUMABLE:
                fix = "it has nothing left to do" if record.actual is ActualState.FINISHED else "drain or stop it first"
                raise RunRefused(f"run {run_id} is {record.actual} and cannot be resumed: {fix}")
            self._refuse_taken_name(record.owner, record.name)
            if recipe is not None:
                self._requests.put(replace(self._request(run_id), recipe=recipe))
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
        with self._file.transaction():
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
        with self._file.transaction():
            record = self.get(run_id)
            reason = _one_line(reason)
            if reason == record.reason:
                return record
            return self._save(replace(record, reason=reason), reason or str(record.actual), now_s)

    def note(self, run_id: str, text: str, *, now_s: float) -> RunEvent:
        """Append an event that changes nothing else, such as the loss of a node. Raises RunUnknown."""
        with self._file.transaction():
            return self._append_event(self.get(run_id), _one_line(text), now_s)

    def events(self, run_id: str, *, after: int = 0) -> tuple[RunEvent, ...]:
        """Return the events that are kept and have a number above `after`, oldest first. Raises RunUnknown."""
        return tuple(stored.event for stored in self._events.all(self.get(run_id).run_id, after=after))

    def _save(self, record: RunRecord, text: str, now_s: float) -> RunRecord:
        self._runs.put(record)
        self._append_event(record, text, now_s)
        return record

    def _append_event(self, record: RunRecord, text: str, now_s: float) -> RunEvent:
        newest = self._events.last(record.run_id)
        number = 1 if newest is None else newest.number + 1
        event = RunEvent(number=number, time_s=now_s, state=record.actual, text=text)
        self._events.put(_StoredEvent(record.run_id, number, event))
        self._events.drop(record.run_id, number - EVENTS_KEPT)
        return event


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
