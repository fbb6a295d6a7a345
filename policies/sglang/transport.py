"""HTTP transport to one server.

Invariants:
- Every call has a deadline, and every failure is an EngineError.
- Only this module converts transport errors and statuses to EngineErrors.
- Every call carries the key of the server, if it has one; no error contains it. It names the caller's span.
"""

from __future__ import annotations

import os
from typing import Any, Final

import aiohttp
import orjson

from headrace.buffer.primitives.trace_context import trace_headers
from headrace.policies.engine import EngineId
from headrace.policies.errors import (
    EngineDown,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    FlushRefused,
    GrammarMissing,
    GrammarRefused,
    NoSession,
    PromptTooLong,
    RequestInvalid,
    SessionAlreadyOpen,
    UnknownGroup,
    WeightsMixed,
)
from headrace.policies.sglang.replies import error_text, parse_object

_TEXTS: Final[tuple[tuple[str, str, type[EngineRefused]], ...]] = (
    # First, since these texts repeat the schema, which may contain any of the others.
    ("/generate", "Failed to compile", GrammarRefused),
    ("/generate", "Grammar preprocessing timed out", GrammarRefused),
    ("/generate", "Grammar-based generation", GrammarMissing),
    ("", "partially updated", WeightsMixed),
    ("", "Weights were updated, but", WeightsMixed),
    ("/begin_weight_update", "already open", SessionAlreadyOpen),
    ("/end_weight_update", "session is open", NoSession),
    ("/update_weights_from_", "must run between", NoSession),
    ("/update_weights_from_", "session is open", NoSession),
    ("/update_weights_from_distributed", "not in [", UnknownGroup),
    ("/update_weights_from_distributed", "does not exist", UnknownGroup),
    ("/destroy_weights_update_group", "does not exist", UnknownGroup),
    ("/flush_cache", "", FlushRefused),
    ("/generate", "longer than the model's context length", PromptTooLong),
    ("/generate", "exceeds the model's maximum context length", PromptTooLong),
)
"""Prefix of the route, part of the text, and error; the first match counts."""


def refusal(status: int, path: str, text: str, engine: str) -> EngineRefused:
    """Return the error for a 4xx reply."""
    kinds = (kind for route, part, kind in _TEXTS if path.startswith(route) and part in text)
    return next(kinds, EngineRefused)(status, f"{engine}: {path}: {text}")


def authorization(key: str | None) -> dict[str, str]:
    """Return the header that carries a key; none without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class Transport:
    """Transport to one server. The session belongs to the caller."""

    def __init__(
        self, engine_id: EngineId, url: str, session: aiohttp.ClientSession, *, timeout_s: float, key: str | None = None
    ) -> None:
        self.engine_id = engine_id
        self.url = url.rstrip("/")
        self._session = session
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"} | authorization(key)

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object of a GET reply."""
        return parse_object(path, await self.call("GET", path))

    async def post(self, path: str, body: object, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the JSON object of a POST reply."""
        return parse_object(path, await self.call("POST", path, body, timeout_s=timeout_s))

    async def call(self, method: str, path: str, body: object = None, *, timeout_s: float | None = None) -> bytes:
        """Return the bytes of a 2xx or 3xx reply. Raises EngineError otherwise, RequestInvalid for a body that cannot
        be encoded as JSON (a lone surrogate, a number of more than 64 bits)."""
        timeout_s = timeout_s or self._timeout_s
        try:
            data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError as error:
            raise RequestInvalid(f"{self.engine_id}: {path}: the body cannot be sent: {error}") from error
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=self._headers | trace_headers(),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                status, payload = response.status, await response.read()
        except TimeoutError as error:
            raise EngineTimeout(f"{self.engine_id}: no answer to {path} within {timeout_s} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineDown(f"{self.engine_id}: nothing is listening at {self.url}: {reason(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{self.engine_id}: {path} at {self.url}: {reason(error)}") from error
        if status >= 500:
            raise EngineUnavailable(f"{self.engine_id}: {path} answered {status}: {error_text(payload)}")
        if status == 401:
            raise EngineRefused(
                status,
                f"{self.engine_id}: {path} at {self.url} needs another key: set engines.key_file (of the gateway: "
                "--engine-key-file) to a file with the key of that server",
            )
        if status >= 400:
            raise refusal(status, path, error_text(payload), self.engine_id)
        return payload


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
