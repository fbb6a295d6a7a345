"""Errors of the control API as HTTP answers: `{"error": {"code", "message"}}`.

Invariants:
- Every error has one status and one code. The client turns codes back into errors (`error_of`).
- What went wrong inside the service is logged, not sent.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import orjson
from starlette.responses import Response

from headrace.actors.errors import (
    ActorGone,
    ActorLost,
    ApiRefused,
    CannotBePlaced,
    ConfigError,
    EngineGroupError,
    EngineUnknown,
    QuotaExceeded,
    RoleTooSmall,
    RunRefused,
    RunsMissing,
    RunUnknown,
    SubmissionConflict,
)
from headrace.actors.run.exit_codes import EXIT_BAD_INPUT, EXIT_TRANSIENT, exit_code
from headrace.policies.errors import LeaseLost, TrainerRefused

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 2
INTERNAL: Final = "internal"
CODES: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (RunUnknown, 404, "run_unknown"),
    (RunsMissing, 404, "runs_missing"),
    (EngineUnknown, 404, "engine_unknown"),
    (SubmissionConflict, 409, "submission_conflict"),
    (CannotBePlaced, 409, "cannot_be_placed"),
    (RunRefused, 409, "run_refused"),
    (EngineGroupError, 409, "engine_refused"),
    (LeaseLost, 409, "lease_lost"),
    (TrainerRefused, 400, "trainer_refused"),
    (QuotaExceeded, 403, "quota_exceeded"),
    (RoleTooSmall, 403, "role_too_small"),
    (ConfigError, 400, "config_invalid"),
)
"""Status and code of each error; the first class that fits counts."""


class ApiRefusal(Exception):
    """A request that the API refuses by itself."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


def answer(document: Any, status: int = 200) -> Response:
    """Return a JSON answer; dataclasses may be part of the document."""
    return Response(orjson.dumps(document), status_code=status, media_type="application/json")


def refused(status: int, code: str, message: str) -> Response:
    response = answer({"error": {"code": code, "message": message}}, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def refusal_of(error: Exception) -> Response:
    """Return the answer for an error of a handler."""
    if isinstance(error, ApiRefusal):
        return refused(error.status, error.code, error.message)
    if isinstance(error, (ActorLost, ActorGone, TimeoutError)):
        return refused(503, "runs_away", "the service of runs does not answer at present: try again")
    for kind, status, code in CODES:
        if isinstance(error, kind):
            return refused(status, code, str(error))
    # Errors of models, tasks and sandboxes: their classification exists already.
    if exit_code(error) == EXIT_BAD_INPUT:
        return refused(400, "input_invalid", str(error))
    if exit_code(error) == EXIT_TRANSIENT:
        return refused(503, "unavailable", str(error))
    logger.error("a request failed", exc_info=error)
    return refused(500, INTERNAL, "the request failed inside the service: its log has the reason")


def error_of(status: int, code: str, message: str) -> Exception:
    """Return the error for an answer of the API."""
    if status >= 500 and code != INTERNAL:
        return ActorLost(f"the control API answered {status}: {message}")
    for kind, _, known in CODES:
        if code == known:
            return kind(message)
    return ApiRefused(message)
