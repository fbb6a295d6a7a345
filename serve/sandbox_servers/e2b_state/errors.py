"""Error responses of the server, with E2B's codes on the control plane and Connect's codes on envd.

Invariants: every SandboxError has one response on each side. `Should-Retry` is true for errors after which a retry may
help, and false if the request may have had an effect but has no key by which to find it. The server itself does not
retry anything.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from aiohttp import web

from headrace.sandboxes.errors import (
    BootTimeout,
    CapacityExceeded,
    ExecTimeout,
    ImageRefused,
    ImageUnknown,
    ProviderUnreachable,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
    TransientSandboxError,
    Unsupported,
)


class ApiError(Exception):
    """An error response of the control plane or of `/files`. `error_code` is E2B's machine-readable name for the error,
    if any."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_code: str = "",
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_code = error_code
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    def response(self) -> web.Response:
        body: dict[str, object] = {"code": self.status, "message": self.message}
        if self.error_code:
            body["error_code"] = self.error_code
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.should_retry is not None:
            headers["Should-Retry"] = "true" if self.should_retry else "false"
        return web.json_response(body, status=self.status, headers=headers)


class Code(StrEnum):
    """Codes of the Connect protocol (connectrpc.com/docs/protocol, Error Codes)."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request is invalid."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """`Connect-Timeout-Ms` has passed."""
    NOT_FOUND = "not_found"
    """The path or process does not exist."""
    ALREADY_EXISTS = "already_exists"
    """The path exists."""
    PERMISSION_DENIED = "permission_denied"
    """The user lacks permission."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """No disk space or capacity is left."""
    FAILED_PRECONDITION = "failed_precondition"
    """The request is not possible in this state."""
    UNIMPLEMENTED = "unimplemented"
    """The provider does not support the request."""
    INTERNAL = "internal"
    """Any other error."""
    UNAVAILABLE = "unavailable"
    """The sandbox is gone or does not respond."""
    UNAUTHENTICATED = "unauthenticated"
    """The user does not exist."""


_STATUS_OF_CODE: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}


class RpcError(Exception):
    """An error response of one of envd's Connect methods."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def to_json(self) -> dict[str, str]:
        return {"code": self.code.value, "message": self.message}

    def response(self) -> web.Response:
        return web.json_response(self.to_json(), status=_STATUS_OF_CODE[self.code])


def not_found(sandbox_id: str) -> ApiError:
    """Return the control plane's error for a sandbox that does not exist or belongs to another key."""
    return ApiError(404, f"sandbox {sandbox_id!r} not found")


def not_running(sandbox_id: str) -> ApiError:
    """Return the error that the proxy in front of envd sends. The SDK recognises a dead or paused sandbox by `was not
    found`."""
    return ApiError(502, f"The sandbox {sandbox_id} was not found")


def unsupported(what: str) -> ApiError:
    return ApiError(501, f"{what} is unsupported by this server", error_code="unsupported")


def api_error(error: SandboxError, *, repeatable: bool = True) -> ApiError:
    """Return the control plane's response to an error. `repeatable` means that a repeated request finds the result of
    the first."""
    match error:
        case CapacityExceeded():
            return ApiError(429, error.message, retry_after_s=error.retry_after_s)
        case ImageUnknown() | ImageRefused():
            return ApiError(400, error.message)
        case Unsupported():
            return ApiError(501, error.message, error_code="unsupported")
        case SpecRefused():
            return ApiError(400, error.message)
        case SecretRefused():
            return ApiError(403, error.message)
        case SandboxGone():
            return ApiError(404, error.message)
        case BootTimeout():
            return ApiError(504, error.message, error_code="sandbox_create_failed", should_retry=True)
        case ProviderUnreachable():
            return ApiError(503, error.message, error_code="sandbox_create_failed", should_retry=repeatable)
        case TransientSandboxError():
            return ApiError(503, error.message, error_code="sandbox_create_failed", should_retry=True)
    return ApiError(500, str(error), error_code="internal_server_error")


def rpc_error(error: SandboxError, sandbox_id: str) -> RpcError:
    """Return envd's response to an error."""
    match error:
        case SandboxGone():
            return RpcError(Code.UNAVAILABLE, f"The sandbox {sandbox_id} was not found")
        case ExecTimeout():
            return RpcError(Code.DEADLINE_EXCEEDED, error.message)
        case Unsupported():
            return RpcError(Code.UNIMPLEMENTED, error.message)
        case SpecRefused() | SandboxFileError():
            return RpcError(Code.FAILED_PRECONDITION, error.message)
        case CapacityExceeded():
            return RpcError(Code.RESOURCE_EXHAUSTED, error.message)
        case TransientSandboxError():
            return RpcError(Code.UNAVAILABLE, error.message)
    return RpcError(Code.INTERNAL, str(error))
