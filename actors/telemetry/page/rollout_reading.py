"""What the files of a run say about one rollout: its attempts, its text, its evaluator's log, and its lines of logs.

Invariants:
- Everything is bounded: attempts, text, log lines, and the bytes of logs that are searched, from the newest back.
- A rollout is named by its id or by an unambiguous beginning of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.errors import RunError
from headrace.actors.record.files.log_lines import logs_in
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.page.text import ShownText, name, shown
from headrace.actors.telemetry.page.trajectory_text import TrajectoryText, read_text
from headrace.actors.telemetry.slow.timelines import AttemptTimeline, timelines_of
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.serve.tracing.retention import kept_files

MAX_ATTEMPTS: Final = 50
MAX_LINES: Final = 200
SEARCHED_BYTES: Final = 64 << 20
"""Bytes of the newest logs that are searched for lines of a rollout."""
BLOCK_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 1 << 20
MAX_CONVERSATION_BYTES: Final = 16 << 20
_ATTEMPT: Final = (
    "attempt",
    "version",
    "issued_at_s",
    "ended_at_s",
    "cause",
    "reward",
    "solved",
    "trainable",
    "detail",
    "turns",
    "trace_id",
    "host",
    "charged_to",
    "trajectory_file",
)


class RolloutUnknown(RunError):
    """The run has no such rollout, or several whose ids begin like this; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of an evaluation's rollout, as the gateway recorded it."""

    prompt: ShownText
    answer: ShownText


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDetails:
    """One rollout. `row` has its columns in the ledger and those of its group; `tag` is set for a rollout of an
    evaluation."""

    rollout_id: str
    row: Mapping[str, Any]
    attempts: tuple[Mapping[str, Any], ...]
    attempts_left_out: int = 0
    timelines: tuple[AttemptTimeline, ...] = ()
    text: TrajectoryText | None = None
    tag: str = ""
    conversation: tuple[Turn, ...] = ()
    evaluator_log: ShownText | None = None
    patch: ShownText | None = None
    lines: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def read_rollout(directory: RunDirectory, asked: str) -> RolloutDetails:
    """Read a rollout. Raises RolloutUnknown, LedgerRefused, OSError."""
    with reading(directory.path) as (database, archive):
        attached, damage = begin_with_archive(database, archive)
        rows = JoinedRows(database, attached=attached)
        rollout_id = find(rows, asked)
        found = rows.select(
            "rollouts",
            ("group_id", "member", "state", "attempt", "reward", "advantage", "late", "batch_id", "reason"),
            where="rollout_id = ?",
            values=(rollout_id,),
        ).fetchone()
        if found is None:
            return evaluated_rollout(directory, rows, rollout_id, tuple(damage))
        names = ("group", "member", "state", "attempt", "reward", "advantage", "late", "batch", "reason")
        row = dict(zip(names, found, strict=True)) | group_columns(rows, found[0]) | batch_columns(rows, found[7])
        tries = rows.select("attempts", _ATTEMPT, where="rollout_id = ?", values=(rollout_id,)).fetchall()
        timelines = timelines_of(rows, rollout_id)
    attempts = [dict(zip(_ATTEMPT, each, strict=True)) for each in sorted(tries)]
    last = attempts[-1] if attempts else None
    text = None if last is None else read_text(directory, rollout_id, last["attempt"], last["trajectory_file"])
    lines, notes = log_lines(directory, rollout_id)
    return RolloutDetails(
        rollout_id=rollout_id,
        row=row,
        attempts=tuple(attempts[-MAX_ATTEMPTS:]),
        attempts_left_out=max(0, len(attempts) - MAX_ATTEMPTS),
        timelines=timelines,
        text=text,
        lines=lines,
        notes=(*damage, *notes),
    )


def find(rows: JoinedRows, asked: str) -> str:
    """Return the id of a rollout by itself or an unambiguous beginning. Raises RolloutUnknown."""
    # A lone surrogate cannot be a part of an id, nor of a query.
    wanted = asked.strip().encode(errors="replace").decode()
    if not wanted:
        raise RolloutUnknown("name a rollout: its id, or the beginning of one")
    said = name(wanted, 80)
    after = wanted[:-1] + chr(min(ord(wanted[-1]) + 1, 0x10FFFF))
    found: set[str] = set()
    for table in ("rollouts", "evaluations"):
        ids = rows.select(
            table, ("DISTINCT rollout_id",), where="rollout_id >= ? AND rollout_id < ?", values=(wanted, after)
        )
        found.update(rollout for (rollout,) in ids.fetchmany(1000))
    if wanted in found:
        return wanted
    if not found:
        raise RolloutUnknown(f"rollout {said}: the run has none of this id; the view of slow rollouts lists ids")
    if len(found) > 1:
        some, count = ", ".join(name(each, 80) for each in sorted(found)[:3]), len(found)
        many = f"{count} or more" if count >= 1000 else str(count)
        raise RolloutUnknown(f"rollout {said}: {many} rollouts begin with this ({some}, ...); name one of them")
    return found.pop()


def group_columns(rows: JoinedRows, group_id: str) -> dict[str, Any]:
    columns = ("task_id", "state", "opened_at_s", "ended_at_s", "rule", "min_members")
    found = rows.select("groups", columns, where="group_id = ?", values=(group_id,)).fetchone()
    names = ("task", "group_state", "group_opened_s", "group_ended_s", "rule", "min_members")
    return dict(zip(names, found, strict=True)) if found else {}


def batch_columns(rows: JoinedRows, batch_id: str | None) -> dict[str, Any]:
    if batch_id is None:
        return {}
    columns = ("version", "committed_at_s", "skipped")
    where = "batch_id = ? AND rolled_back_by IS NULL"
    found = rows.select("commits", columns, where=where, values=(batch_id,)).fetchone()
    return {} if found is None else dict(zip(("trained_version", "trained_at_s", "skipped"), found, strict=True))


def evaluated_rollout(
    directory: RunDirectory, rows: JoinedRows, rollout_id: str, notes: tuple[str, ...]
) -> RolloutDetails:
    """Return an answer of an evaluation, with the files that it left."""
    columns = ("attempt", "task_id", "tag", "version", "cause", "reward", "solved", "detail", "recorded_at_s", "host")
    tries = rows.select("evaluations", columns, where="rollout_id = ?", values=(rollout_id,)).fetchall()
    attempts = [dict(zip(columns, each, strict=True)) for each in sorted(tries)]
    last = attempts[-1]
    folder = folder_of(directory.evaluations / plain_part(str(last["tag"])), rollout_id)
    lines, more = log_lines(directory, rollout_id)
    if folder is None:
        more = ("The folder of this answer is gone, or was never written.", *more)
    return RolloutDetails(
        rollout_id=rollout_id,
        row={"task": last["task_id"], "state": "evaluated", "reward": last["reward"]},
        attempts=tuple(attempts[-MAX_ATTEMPTS:]),
        attempts_left_out=max(0, len(attempts) - MAX_ATTEMPTS),
        timelines=timelines_of(rows, rollout_id),
        tag=str(last["tag"]),
        conversation=() if folder is None else tuple(conversation_of(folder / "conversation.jsonl")),
        evaluator_log=None if folder is None else beginning_of(folder / "evaluator.log"),
        patch=None if folder is None else beginning_of(folder / "patch.diff"),
        lines=lines,
        notes=(*notes, *more),
    )


def folder_of(evaluation: Path, rollout_id: str) -> Path | None:
    """Return the folder of an answer, by its line in the results of the evaluation."""
    sought = orjson.dumps(rollout_id)
    try:
        with (evaluation / "results.jsonl").open("rb") as file:
            for line in file:
                if sought in line:
                    document = orjson.loads(line)
                    if document.get("rollout_id") == rollout_id and document.get("folder"):
                        # The folder's name comes from a task's id; it is never used as a path.
                        folder = evaluation / "rollouts" / plain_part(document["folder"])
                        return folder if folder.is_dir() else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return None


def plain_part(text: str) -> str:
    """Return the last part of a path, which leads to no folder above; `-` if there is none."""
    part = Path(text).name
    return "-" if part in ("", "..") else part


def conversation_of(path: Path) -> Iterator[Turn]:
    try:
        with path.open("rb") as file:
            for line in file.read(MAX_CONVERSATION_BYTES).splitlines()[:MAX_LINES]:
                yield turn_of(line)
    except OSError:
        return


def turn_of(line: bytes) -> Turn:
    """Return a turn; of a line that is cut or damaged, what is there."""
    try:
        # Unlike orjson, it reads lone surrogates.
        document = json.loads(line)
        return Turn(prompt=shown(str(document["prompt"])), answer=shown(str(document["answer"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Turn(
            prompt=shown("This line of conversation.jsonl is cut or damaged:"),
            answer=shown(line.decode(errors="replace")),
        )


def beginning_of(path: Path) -> ShownText | None:
    try:
        with path.open("rb") as file:
            return shown(file.read(MAX_FILE_BYTES).decode(errors="replace"))
    except OSError:
        return None


def log_lines(directory: RunDirectory, rollout_id: str) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return the newest lines of the logs that name a rollout, oldest first, and what was not searched."""
    sought, left, found = orjson.dumps(rollout_id), SEARCHED_BYTES, []
    notes: tuple[str, ...] = ()
    for path in logs_in(directory.logs).values():
        for file in reversed(kept_files(path)):
            if left <= 0:
                notes = (f"Only the newest {SEARCHED_BYTES >> 20} MiB of the logs were searched for its lines.",)
                break
            for line in lines_with(file, sought, left):
                try:
                    event = orjson.loads(line)
                    if event.get("rollout") == rollout_id:
                        found.append(event_of(event))
                except (ValueError, AttributeError, TypeError, KeyError):
                    continue
            left -= file.stat().st_size
    found.sort(key=lambda event: float(event["time"]))
    if len(found) > MAX_LINES:
        notes = (*notes, f"{len(found) - MAX_LINES} older lines of its logs are not shown.")
    return tuple(found[-MAX_LINES:]), notes


def event_of(event: Mapping[str, Any]) -> dict[str, Any]:
    text = "\n".join(str(event[key]) for key in ("message", "exception") if key in event)
    known = {key: name(event.get(key, ""), 80) for key in ("level", "actor", "attempt")}
    return known | {"time": float(event["time"]), "text": shown(text, 4000)}


def lines_with(path: Path, sought: bytes, limit: int) -> Iterator[bytes]:
    """Yield the lines of the last `limit` bytes of a file that have these bytes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        rest = b""
        while block := file.read(BLOCK_BYTES):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            # Most blocks have no such line; looking for it is cheaper than splitting them.
            if newline and sought in whole:
                yield from (line for line in whole.split(b"\n") if sought in line)
