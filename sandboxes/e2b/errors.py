"""Conversion of the e2b SDK's exceptions to sandbox errors.

Invariants: a connection or gateway error (502, 503, 504, a timeout) leaves the effect on the service unknown, so it
becomes ProviderUnreachable. RateLimited always asks for a wait of one second, because the SDK does not return the
service's own value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from headrace.sandboxes.errors import (
    CapacityExceeded,
    ExecTimeout,
    ImageUnknown,
    PermanentSandboxError,
    ProviderUnreachable,
    RateLimited,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
)

_STATUS: Final = re.compile(r"\s*(\d{3})\b")
_TRANSPORTS: Final = ("httpcore", "connectrpc", "pyqwest")
"""Packages of the SDKs' HTTP clients. Any of their exceptions that the SDKs let through are connection errors."""
_GATEWAY: Final = frozenset({500, 502, 503, 504})


class SdkOperation(StrEnum):
    """Kind of operation, which determines what an exception means."""

    CREATE = "create"
    """Creating a sandbox, or querying the account."""
    SANDBOX = "sandbox"
    """Changing a sandbox's state, or starting a command."""
    FILE = "file"
    """Reading or writing a file."""


@contextmanager
def typed(step: SdkOperation) -> Iterator[None]:
    """Convert exceptions from the SDK and its HTTP client to SandboxError."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:
        known = classify(error, step)
        if known is None:
            raise
        raise known from error


def classify(error: Exception, step: SdkOperation) -> SandboxError | None:
    """Return the sandbox error for an exception, or None for an exception that indicates a bug."""
    import e2b
    import httpx

    message = f"e2b: {str(error) or type(error).__name__}"[:500]
    match error:
        case e2b.RateLimitException():
            return RateLimited(message)
        case e2b.AuthenticationException():
            return SecretRefused(message)
        case e2b.NotEnoughSpaceException():
            return SandboxFileError(message)
        case e2b.NotFoundException():
            return {SdkOperation.CREATE: ImageUnknown, SdkOperation.FILE: SandboxFileError}.get(step, SandboxGone)(
                message
            )
        case e2b.InvalidArgumentException():
            return (SandboxFileError if step is SdkOperation.FILE else SpecRefused)(message)
        case e2b.TimeoutException():
            return ProviderUnreachable(message) if step is SdkOperation.CREATE else _timeout(error, message)
        case e2b.SandboxException():
            found = _STATUS.match(str(error))
            status = getattr(error, "status_code", None) or (int(found[1]) if found else 0)
            if status in _GATEWAY:
                return ProviderUnreachable(message)
            if step is SdkOperation.FILE:
                return SandboxFileError(message)
            if step is SdkOperation.CREATE and status in (400, 404) and ("image" in message or "emplate" in message):
                return ImageUnknown(message)
            if status == 404:
                return SandboxGone(message)
            if status in (401, 403):
                return SecretRefused(message)
            if 400 <= status < 500 or status == 501:
                return SpecRefused(message)
            return PermanentSandboxError(message)
        case httpx.TransportError() | ConnectionError() | TimeoutError():
            return ProviderUnreachable(message)
    if type(error).__module__.partition(".")[0] in _TRANSPORTS:
        return ProviderUnreachable(message)
    # 503 in newer SDKs, of no class that older ones have.
    if type(error).__name__ == "ServiceBusyException":
        return CapacityExceeded(message)
    return None


def _timeout(error: Exception, message: str) -> SandboxError:
    """Classify a timeout. The SDKs use one class for a command's timeout, a request's timeout and a missing sandbox."""
    if type(error).__name__ == "SandboxNotRunningException" or "was not found" in message:
        return SandboxGone(message)
    if "unavailable" in message or type(error).__name__ == "SandboxUnreachableException":
        return ProviderUnreachable(message)
    return ExecTimeout(message)
