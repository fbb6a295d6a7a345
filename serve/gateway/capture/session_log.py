"""The session log, with one file of JSON lines per session, from which a killed gateway is restored.

Invariants:
- A line is written with a single call before anything that depends on it is sent. It survives a crash of the process,
  but not of the host (no fsync).
- An incomplete last line (from a process killed while writing) is treated as not written.
- Times in a log are Unix times, since another host, or this one after a restart, has another monotonic clock. They are
  converted when they are written and read; sessions use the monotonic clock.
- Files are private to the user; their names reveal nothing about the session tokens.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.buffer.trajectories.types import VersionSpan
from headrace.sandboxes.host.private_folders import make_missing
from headrace.serve.gateway.capture.echoes import Drift
from headrace.serve.gateway.capture.events import (
    Accepted,
    Delivered,
    Event,
    Exhausted,
    Failed,
    LineageOrigin,
    Recorded,
    Replayed,
    Spent,
    Status,
)
from headrace.serve.gateway.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec, TrainedPart
from headrace.serve.gateway.conversation import Reasoning, RequestPurpose, Text, ToolCall, TurnAnswer, TurnEnd
from headrace.serve.gateway.errors import LogBroken

logger = logging.getLogger(__name__)

FORMAT: Final = 1
_OPEN: Final = ".jsonl"
_FINISHED: Final = ".finished"
_KINDS: Final[dict[str, type[Text | Reasoning | ToolCall]]] = {
    kind.__name__: kind for kind in (Text, Reasoning, ToolCall)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """First line of a log: the session's spec, its token and its opening time (this process's monotonic clock, in
    seconds; before its start for a session of an earlier process)."""

    spec: SessionSpec
    token: str
    opened_at: float


class SessionLog:
    """One gateway's session logs, in one folder. `clock` is the monotonic clock of the sessions, `wall` returns Unix
    seconds."""

    def __init__(
        self, folder: Path, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._clock = folder, clock
        # Taken once: a wall clock that is set later moves no session that is open.
        self._offset_s = wall() - clock()
        make_missing(folder)

    def open(self, opened: Opened) -> None:
        """Create the log of a session. Raises LogBroken."""
        opened_at = opened.opened_at + self._offset_s
        document = {"format": FORMAT, "spec": asdict(opened.spec), "token": opened.token, "opened_at": opened_at}
        self._write(opened.spec.session_id, document, os.O_CREAT | os.O_TRUNC)

    def append(self, session_id: SessionId, event: Event) -> None:
        """Write an event. If this raises LogBroken, nothing that depends on the event may be sent."""
        self._write(session_id, _document(event), 0)

    def finish(self, session_id: SessionId) -> None:
        """Mark a session as finished; its report can still be rebuilt."""
        with suppress(OSError):
            self._path(session_id).replace(self._path(session_id, _FINISHED))

    def remove(self, session_id: SessionId) -> None:
        """Remove the log of an open or finished session, if there is one. If a log cannot be removed, a restarted
        gateway restores its session until the session's wall-time budget ends."""
        for suffix in (_OPEN, _FINISHED):
            try:
                self._path(session_id, suffix).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot remove a session log: %s", error)

    def remove_finished(self, older_than_s: float) -> None:
        """Remove the logs of sessions that were finished more than `older_than_s` seconds ago."""
        oldest = time.time() - older_than_s
        for path in self._folder.glob(f"*{_FINISHED}"):
            with suppress(OSError):
                if path.stat().st_ctime < oldest:
                    path.unlink()

    def known(self) -> Iterator[Opened]:
        """Yield the first line of every readable log."""
        for path in sorted(self._folder.glob(f"*{_OPEN}")):
            try:
                with path.open("rb") as file:
                    yield self._opened(file.readline())
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("skipping invalid session log %s: %s", path.name, error)

    def load_finished(self, session_id: SessionId) -> Session | None:
        """Return a finished session with all its answers; None if its log has been removed or is not readable."""
        path = self._path(session_id, _FINISHED)
        with suppress(LogBroken):
            return self._load(path, keeps_answers=True) if path.exists() else None
        return None

    def load(self, session_id: SessionId, *, keeps_answers: bool = False) -> Session:
        """Return the session as of the last complete line of its log. Raises LogBroken."""
        return self._load(self._path(session_id), keeps_answers=keeps_answers)

    def _load(self, path: Path, *, keeps_answers: bool) -> Session:
        try:
            lines = path.read_bytes().split(b"\n")
            opened = self._opened(lines[0] + b"\n" * (len(lines) > 1))
            session = Session(opened.spec, opened.opened_at, keeps_answers=keeps_answers)
            # The text after the last line end is empty, or a torn line.
            for line in lines[1:-1]:
                session.apply(_event(orjson.loads(line)))
            if lines[-1]:
                # The next line must not continue the torn one.
                os.truncate(path, len(b"\n".join(lines[:-1])) + 1)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LogBroken(f"session log {path.name} cannot be read: {type(error).__name__}: {error}") from error
        return session

    def _opened(self, line: bytes) -> Opened:
        """Return the first line of a log, with times of the monotonic clock."""
        if not line.endswith(b"\n"):
            raise ValueError("its first line is torn")
        document = orjson.loads(line)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its first line does not open a session of format {FORMAT}")
        spec = document["spec"]
        spec |= {"sampling": Sampling(**spec["sampling"]), "budgets": Budgets(**spec["budgets"])}
        spec["train"] = tuple(map(TrainedPart, spec["train"]))
        # The wall clock of the host that opened it may be ahead of this one.
        opened_at = min(document["opened_at"] - self._offset_s, self._clock())
        return Opened(spec=SessionSpec(**spec), token=document["token"], opened_at=opened_at)

    def _path(self, session_id: SessionId, suffix: str = _OPEN) -> Path:
        return self._folder / f"{_stem_of(session_id)}{suffix}"

    def _write(self, session_id: SessionId, document: dict[str, Any], flags: int) -> None:
        data = orjson.dumps(document) + b"\n"
        try:
            descriptor = os.open(self._path(session_id), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
            try:
                written = os.write(descriptor, data)
                if written < len(data):
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                    raise OSError(f"{written} of {len(data)} bytes written")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LogBroken(f"the session log cannot be written: {error}") from error


@lru_cache(maxsize=512)
def _stem_of(session_id: SessionId) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


def _document(event: Event) -> dict[str, Any]:
    match event:
        case Recorded():
            recorded: dict[str, Any] = {
                "parent": event.parent,
                "parts": [part.hex() for part in event.parts],
                "delta": _encode(event.delta),
                "origin": event.origin,
                "wishes": event.options,
                "answer": event.answer,
                "kinds": [type(block).__name__ for block in event.answer.blocks],
                "ids": _encode(array("i", event.ids)),
                "logprobs": _encode(array("f", event.logprobs)),
                "spans": [span.to_json() for span in event.spans],
                "status": event.status.value,
                "truncated": event.truncated,
                "lost_calls": event.lost_calls,
                "opened": event.opened,
                "resumes": event.resumes,
                "dropped": event.dropped,
                "border": event.border,
            }
            if event.kinds is not None:
                recorded["token_kinds"] = event.kinds
            if event.constraint:
                recorded |= {"constraint": event.constraint, "honoured": event.honoured}
            return {"recorded": recorded}
        case Accepted(turn_id=turn_id, drift=drift):
            return {"accepted": turn_id, "drift": drift.value}
        case Delivered(turn_id=turn_id):
            return {"delivered": turn_id}
        case Replayed(turn_id=turn_id):
            return {"replayed": turn_id}
        case Failed(failure=failure):
            return {"failed": failure}
        case Spent(budget=budget):
            return {"spent": budget.value}


def _event(document: dict[str, Any]) -> Event:
    match document:
        case {"recorded": dict() as recorded}:
            origin, answer = recorded.pop("origin"), recorded.pop("answer")
            blocks = (
                _KINDS[kind](**block) for kind, block in zip(recorded.pop("kinds"), answer["blocks"], strict=True)
            )
            answer |= {"blocks": tuple(blocks), "end": TurnEnd(answer["end"])}
            return Recorded(
                parts=tuple(bytes.fromhex(part) for part in recorded.pop("parts")),
                delta=_decode("i", recorded.pop("delta")),
                origin=LineageOrigin(**origin | {"purpose": RequestPurpose(origin["purpose"])}),
                options=recorded.pop("wishes"),
                answer=TurnAnswer(**answer),
                ids=_decode("i", recorded.pop("ids")),
                logprobs=_decode("f", recorded.pop("logprobs")),
                spans=tuple(VersionSpan.from_json(*span) for span in recorded.pop("spans")),
                status=Status(recorded.pop("status")),
                kinds=tuple(map(tuple, runs)) if (runs := recorded.pop("token_kinds", None)) is not None else None,
                **recorded,
            )
        case {"accepted": str() as turn_id, "drift": str() as drift}:
            return Accepted(turn_id=turn_id, drift=Drift(drift))
        case {"delivered": str() as turn_id}:
            return Delivered(turn_id=turn_id)
        case {"replayed": str() as turn_id}:
            return Replayed(turn_id=turn_id)
        case {"failed": str() as failure}:
            return Failed(failure=failure)
        case {"spent": str() as budget}:
            return Spent(budget=Exhausted(budget))
    raise ValueError(f"unknown event: {sorted(document)}")


def _encode(values: array[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _decode(code: str, text: str) -> array[Any]:
    values = array(code)
    values.frombytes(base64.b64decode(text))
    return values
