"""Describes HTTP connection errors in plain words, without class names."""

from __future__ import annotations

import os

import aiohttp


def reason(error: BaseException) -> str:
    """Return `Connection refused` rather than `ClientConnectorError(ConnectionKey(...), ...)`."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError):
        # The errno of a failed name look-up is negative; the error of several failed addresses has none.
        if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
        if cause.strerror:
            return cause.strerror
    return str(cause) or ("timed out" if isinstance(cause, TimeoutError) else type(cause).__name__)
