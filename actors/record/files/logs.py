"""Logs of actors: one JSON line for each event, in a file for each actor and on standard error.

Invariants:
- Logging never ends or blocks an actor: a line that cannot be written, as on a full disk, is counted and dropped, and
  the next line that is written has the count.
- A line is one write and ends with a newline. One that was torn, by a full disk or by a crash, does not damage the
  next.
- No line contains a bearer token, or the value of an environment variable whose name says that it is a secret.
- A line has a bounded size (`MAX_LINE_BYTES`).
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from opentelemetry import context, trace

from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT
from headrace.serve.tracing.retention import RetentionConfig, RotatingFile
from headrace.serve.tracing.tracing import trace_id_text

MAX_MESSAGE: Final = 8_000
MAX_EXCEPTION: Final = 16_000
"""Maximum number of characters; agents write parts of some messages."""
MAX_LINE_BYTES: Final = 160 << 10
"""Size of the largest line: every character of message and exception is one that JSON escapes with six bytes."""
MIN_SECRET: Final = 8
"""Shorter values of secret variables, such as `1`, are left as they are: they would be found in any text."""
REPLACEMENT: Final = "[secret]"

_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer)\s+[\w.~+/=-]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTerms:
    """How the actors of a run write their logs. With `json_stderr` standard error gets the same lines as the file;
    otherwise only the messages of warnings and errors, as text."""

    run_id: str
    folder: Path
    retention: RetentionConfig
    json_stderr: bool


class Redaction:
    """Replaces bearer tokens and the values of an environment's secret variables in texts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        secrets = {
            value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET
        }
        # The longest first: one secret may be the beginning of another.
        ordered = sorted(secrets, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def __call__(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub(REPLACEMENT, text)
        return _BEARER.sub(rf"\1 {REPLACEMENT}", text)


class TextFormatter(logging.Formatter):
    """Formats an event as its message and exception, without secrets."""

    def __init__(self, redact: Redaction) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class EventFormatter(logging.Formatter):
    """Formats an event as a JSON object. `origin` has the fields that all events of this process share."""

    def __init__(self, origin: Mapping[str, str | int], redact: Redaction) -> None:
        super().__init__()
        self._origin = origin
        self._redact = redact

    def event(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields of an event; the guide 'Run directory' describes them."""
        message = _storable(self._redact(record.getMessage()))
        event: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            **self._origin,
            "logger": record.name,
            "message": message[:MAX_MESSAGE],
        }
        if (current := ROLLOUT_ATTEMPT.get()) is not None:
            event["rollout"], event["attempt"] = current
            # Computed, since a process without spans of its own, such as the pool, works for attempts too.
            event["trace"] = trace_id_text(str(self._origin["run"]), *current)
        elif (span := trace.get_current_span().get_span_context()).is_valid:
            event["trace"] = f"{span.trace_id:032x}"
        if record.exc_info:
            exception = _storable(self._redact(self.formatException(record.exc_info)))
            # The error itself is at the end of a traceback.
            event["exception"] = exception[-MAX_EXCEPTION:]
        return event

    def format(self, record: logging.LogRecord) -> str:
        return orjson.dumps(self.event(record)).decode()


class LogFile(logging.Handler):
    """Handler that appends events to a file, which it rotates."""

    def __init__(self, path: Path, retention: RetentionConfig, events: EventFormatter) -> None:
        super().__init__()
        self._path = path
        self._events = events
        self._file = RotatingFile(path, retention, keep_bytes=retention.log_bytes)
        self._dropped = 0
        self._has_folder = False
        """The folder existed when the last event was written."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = self._events.event(record)
        except Exception:  # noqa: BLE001 - arguments of any type, whose text is made here: the handler's usual way
            self.handleError(record)
            return
        if self._dropped:
            event["dropped"] = self._dropped
        try:
            if not self._has_folder:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            is_full = self._file.write(orjson.dumps(event) + b"\n")
        except OSError:
            self._dropped, self._has_folder = self._dropped + 1, False
            return
        self._dropped, self._has_folder = 0, True
        if is_full:
            # The file continues to grow, and the next event tries again.
            with suppress(OSError):
                self._file.rotate()


def leave_rollout() -> None:
    """Let the current task work for no single attempt from now on: its events name no rollout and no trace."""
    ROLLOUT_ATTEMPT.set(None)
    context.attach(context.Context())


def log_path(folder: Path, actor: str) -> Path:
    """Return the file of an actor's log; older lines are in files beside it."""
    return folder / f"{actor}.jsonl"


def begin_logs(terms: LogTerms, *, actor: str, node: str) -> None:
    """Write the events of this process, which is an actor's, as `terms` say. `node` is the id of its Ray node, or empty
    outside Ray. Our own loggers write from level INFO, others from WARNING."""
    redact = Redaction(os.environ)
    origin: dict[str, str | int] = {
        "run": terms.run_id,
        "actor": actor,
        "node": node or socket.gethostname(),
        "pid": os.getpid(),
    }
    events = EventFormatter(origin, redact)
    stderr = logging.StreamHandler()
    stderr.setFormatter(events if terms.json_stderr else TextFormatter(redact))
    stderr.setLevel(logging.NOTSET if terms.json_stderr else logging.WARNING)
    root = logging.getLogger()
    root.addHandler(LogFile(log_path(terms.folder, actor), terms.retention, events))
    root.addHandler(stderr)
    logging.getLogger("headrace").setLevel(logging.INFO)


def _storable(text: str) -> str:
    """Return text without lone surrogates, which JSON cannot have."""
    return text.encode("utf-8", "replace").decode()
