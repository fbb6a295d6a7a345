"""JSON encoding of sandbox errors for transfer between the exec server and its clients.

Invariants: the name, the message, the kind (transient or permanent) and the time to wait are transferred. An error
whose name the other side does not know still has the right kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.sandboxes.errors import (
    CapacityExceeded,
    PermanentSandboxError,
    SandboxError,
    SandboxGone,
    SecretRefused,
    TransientSandboxError,
    error_from_name,
)

_MAX_WAIT_S: Final = 3600.0


def to_document(error: SandboxError) -> dict[str, Any]:
    named = next(kind for kind in type(error).__mro__ if kind.__module__ == SandboxError.__module__)
    document: dict[str, Any] = {"error": named.__name__, "message": error.message, "transient": error.transient}
    if isinstance(error, CapacityExceeded):
        document["retry_after_s"] = error.retry_after_s
    return document


def from_document(document: Mapping[str, Any]) -> SandboxError:
    """Return the typed error of an error document."""
    message = str(document.get("message", ""))
    error = error_from_name(str(document.get("error", "")), message)
    if isinstance(error, CapacityExceeded):
        wait_s = document.get("retry_after_s")
        if isinstance(wait_s, int | float):
            return type(error)(message, min(_MAX_WAIT_S, max(0.0, float(wait_s))))
        return error
    if type(error) is SandboxError:
        return TransientSandboxError(message) if document.get("transient") is True else PermanentSandboxError(message)
    return error


def status_of(error: SandboxError) -> int:
    """Return the HTTP status: 401, 410, 429, 503 for other transient errors, else 422."""
    match error:
        case SecretRefused():
            return 401
        case SandboxGone():
            return 410
        case CapacityExceeded():
            return 429
        case TransientSandboxError():
            return 503
        case _:
            return 422
