"""The session log: a file of JSON lines for each session, from which a gateway that was killed comes back.

Invariants:
- A line is written with one call before anything that depends on it leaves: it outlives the process, not the host (no
  fsync).
- A torn last line (killed while writing) is as if it had not been written.
- Files are private to the user; their names tell nothing about the tokens that open sessions.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import time
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import TokenSpan
from headrace.sandboxes.private_folders import make_missing
from headrace.serve.capture.events import Accepted, Delivered, Exhausted, Failed, Origin, Recorded, Spent, Status
from headrace.serve.capture.matching import Drift
from headrace.serve.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec
from headrace.serve.conversation import Purpose, Reasoning, Text, ToolCall, TurnAnswer, TurnEnd
from headrace.serve.errors import LogBroken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.serve.capture.events import Event

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
_OPEN: Final = ".jsonl"
_FINISHED: Final = ".finished"
_KINDS: Final[dict[str, type[Text | Reasoning | ToolCall]]] = {
    kind.__name__: kind for kind in (Text, Reasoning, ToolCall)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The first line: what was opened, under which token, when (monotonic seconds of this host)."""

    spec: SessionSpec
    token: str
    opened_at: float


class SessionLog:
    """The logs of one gateway, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_missing(folder)

    def open(self, opened: Opened) -> None:
        """Begin a file. Raises LogBroken."""
        document = {"schema": SCHEMA, "spec": asdict(opened.spec), "token": opened.token, "opened_at": opened.opened_at}
        self._write(opened.spec.session_id, document, os.O_CREAT | os.O_TRUNC)

    def append(self, session_id: SessionId, event: Event) -> None:
        """Raises LogBroken: nothing that depends on the event may leave."""
        self._write(session_id, _document(event), 0)

    def finish(self, session_id: SessionId) -> None:
        """The session is over; its report can still be made again."""
        with suppress(OSError):
            self._path(session_id).replace(self._path(session_id, _FINISHED))

    def remove(self, session_id: SessionId) -> None:
        """Forget a session, open or finished; nothing happens when it has no file. One that cannot be removed comes
        back with a restart, until its wall budget ends."""
        for suffix in (_OPEN, _FINISHED):
            try:
                self._path(session_id, suffix).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("a session log cannot be removed: %s", error)

    def remove_finished(self, older_than_s: float) -> None:
        """Forget what was finished so long ago."""
        oldest = time.time() - older_than_s
        for path in self._folder.glob(f"*{_FINISHED}"):
            with suppress(OSError):
                if path.stat().st_ctime < oldest:
                    path.unlink()

    def known(self) -> Iterator[Opened]:
        """The first line of every readable file."""
        for path in sorted(self._folder.glob(f"*{_OPEN}")):
            try:
                with path.open("rb") as file:
                    yield _opened(file.readline())
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("session log %s is no session: %s", path.name, error)

    def load_finished(self, session_id: SessionId) -> Session | None:
        """A session that was finished; None when it is not there any more, or not readable."""
        path = self._path(session_id, _FINISHED)
        with suppress(LogBroken):
            return self._load(path) if path.exists() else None
        return None

    def load(self, session_id: SessionId) -> Session:
        """The session as it was when the last whole line was written. Raises LogBroken."""
        return self._load(self._path(session_id))

    def _load(self, path: Path) -> Session:
        try:
            lines = path.read_bytes().split(b"\n")
            opened = _opened(lines[0] + b"\n" * (len(lines) > 1))
            session = Session(opened.spec, opened.opened_at)
            # What follows the last line end is empty, or torn.
            for line in lines[1:-1]:
                session.apply(_event(orjson.loads(line)))
            self._cut(path, len(b"\n".join(lines[:-1])) + 1, torn=bool(lines[-1]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LogBroken(f"session log {path.name} cannot be read: {type(error).__name__}: {error}") from error
        return session

    @staticmethod
    def _cut(path: Path, length: int, *, torn: bool) -> None:
        """Take a torn end away, so that the next line does not continue it."""
        if torn:
            os.truncate(path, length)

    def _path(self, session_id: SessionId, suffix: str = _OPEN) -> Path:
        return self._folder / f"{_name(session_id)}{suffix}"

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


@lru_cache(maxsize=8192)
def _name(session_id: SessionId) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


def _document(event: Event) -> dict[str, Any]:
    match event:
        case Recorded():
            return {"recorded": _recorded_document(event)}
        case Accepted(turn_id=turn_id, drift=drift):
            return {"accepted": turn_id, "drift": drift.value}
        case Delivered(turn_id=turn_id, at=at):
            return {"delivered": turn_id, "at": at}
        case Failed(failure=failure):
            return {"failed": failure}
        case Spent(budget=budget):
            return {"spent": budget.value}


def _event(document: dict[str, Any]) -> Event:
    match document:
        case {"recorded": dict() as recorded}:
            return _recorded(recorded)
        case {"accepted": str() as turn_id, "drift": str() as drift}:
            return Accepted(turn_id=turn_id, drift=Drift(drift))
        case {"delivered": str() as turn_id, "at": float() | int() as at}:
            return Delivered(turn_id=turn_id, at=at)
        case {"failed": str() as failure}:
            return Failed(failure=failure)
        case {"spent": str() as budget}:
            return Spent(budget=Exhausted(budget))
    raise ValueError(f"no event: {sorted(document)}")


def _recorded_document(event: Recorded) -> dict[str, Any]:
    return {
        "parent": event.parent,
        "parts": [part.hex() for part in event.parts],
        "delta": _encode(event.delta),
        "origin": event.origin,
        "wishes": event.wishes,
        "answer": event.answer,
        "kinds": [type(block).__name__ for block in event.answer.blocks],
        "ids": _encode(array("i", event.ids)),
        "logprobs": _encode(array("f", event.logprobs)),
        "spans": [[span.start, span.end, str(span.version), span.stale_kv] for span in event.spans],
        "status": event.status.value,
        "truncated": event.truncated,
        "lost_calls": event.lost_calls,
    }


def _recorded(document: dict[str, Any]) -> Recorded:
    origin, answer = document.pop("origin"), document.pop("answer")
    blocks = (_KINDS[kind](**block) for kind, block in zip(document.pop("kinds"), answer["blocks"], strict=True))
    answer |= {"blocks": tuple(blocks), "end": TurnEnd(answer["end"])}
    return Recorded(
        parts=tuple(bytes.fromhex(part) for part in document.pop("parts")),
        delta=_decode("i", document.pop("delta")),
        origin=Origin(**origin | {"purpose": Purpose(origin["purpose"])}),
        answer=TurnAnswer(**answer),
        ids=_decode("i", document.pop("ids")),
        logprobs=_decode("f", document.pop("logprobs")),
        spans=tuple(
            TokenSpan(start=start, end=end, version=PolicyVersion.parse(version), stale_kv=any(stale_kv))
            # Logs of the first versions do not tell whether keys and values were stale.
            for start, end, version, *stale_kv in document.pop("spans")
        ),
        status=Status(document.pop("status")),
        **document,
    )


def _opened(line: bytes) -> Opened:
    if not line.endswith(b"\n"):
        raise ValueError("its first line is torn")
    document = orjson.loads(line)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"its first line does not begin a session of schema {SCHEMA}")
    spec = document["spec"]
    spec |= {"sampling": Sampling(**spec["sampling"]), "budgets": Budgets(**spec["budgets"])}
    return Opened(spec=SessionSpec(**spec), token=document["token"], opened_at=document["opened_at"])


def _encode(values: array[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _decode(code: str, text: str) -> array[Any]:
    values = array(code)
    values.frombytes(base64.b64decode(text))
    return values
