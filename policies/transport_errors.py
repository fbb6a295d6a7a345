"""Errors of HTTP connections in words for people: no class names, no tuples."""

from __future__ import annotations

import os

import aiohttp


def reason(error: BaseException) -> str:
    """`Connection refused` rather than `ClientConnectorError(ConnectionKey(...), ...)`."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError):
        # A failed look-up of a name has a number of its own kind, below 0; several failed addresses have none.
        if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
        if cause.strerror:
            return cause.strerror
    return str(cause) or ("timed out" if isinstance(cause, TimeoutError) else type(cause).__name__)
