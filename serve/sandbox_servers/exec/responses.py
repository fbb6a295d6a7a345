"""Responses of the exec server: documents, bytes and typed errors, with a heartbeat while the work is running.

Invariants:
- An error is a document with `error`, `message` and `transient`, whatever the status of its response.
- While work is running, its client receives a blank every `HEARTBEAT_S` seconds: a longer silence means that the server
  or the connection is lost. Blanks before a JSON document do not change its meaning.
- Bytes are sent unchanged after a `=`, with which no JSON document begins.
- A client that disconnects cancels its work, unless the work is shared.
- Comparisons take constant time; a key never grants access to another owner's sandbox; a secret grants access to one
  sandbox and cannot create any. Without a key file, all clients are the same owner, and the server listens on loopback
  only.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from hmac import compare_digest
from typing import Any, Final

import orjson
from aiohttp import web

from headrace.sandboxes.errors import CapacityExceeded, PermanentSandboxError, SandboxError, SecretRefused
from headrace.sandboxes.remote.error_documents import status_of, to_document
from headrace.serve.sandbox_servers.e2b_state.keys import ANYONE, ApiKeys, Owner
from headrace.serve.sandbox_servers.exec.registry import LeasedSandbox

ErrorEncoder = Callable[[SandboxError], "ResponseParts"]

HEARTBEAT_S: Final = 5.0
_JSON: Final = "application/json"

logger = logging.getLogger(__name__)

ResponseParts = tuple[int, Any, "Mapping[str, str]"]
"""Status, document and additional headers."""


def retry_after(error: SandboxError) -> dict[str, str]:
    """Return the header with the time to wait, in whole seconds."""
    if not isinstance(error, CapacityExceeded):
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def error_parts(error: SandboxError) -> ResponseParts:
    return status_of(error), to_document(error), retry_after(error)


async def respond(
    request: web.Request, work: Coroutine[Any, Any, Any], of_error: ErrorEncoder = error_parts
) -> web.StreamResponse:
    """Run `work` and respond with its document or bytes, or its SandboxError. The status is always 200 once a blank has
    been sent."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=HEARTBEAT_S)
        if done:
            return _plain(_settled(request, task, of_error))
        response = web.StreamResponse(headers={"Content-Type": _JSON})
        await response.prepare(request)
        while not done:
            await response.write(b" ")
            done, _ = await asyncio.wait((task,), timeout=HEARTBEAT_S)
        await response.write(_body(_settled(request, task, of_error)[1]))
        await response.write_eof()
        return response
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


def error_response(error: SandboxError, of_error: ErrorEncoder = error_parts) -> web.Response:
    return _plain(of_error(error))


def _plain(parts: ResponseParts) -> web.Response:
    status, document, headers = parts
    return web.Response(body=_body(document), status=status, content_type=_JSON, headers=dict(headers))


def _body(document: Any) -> bytes:
    return b"=" + document if isinstance(document, bytes) else orjson.dumps(document)


def _settled(request: web.Request, task: asyncio.Task[Any], of_error: ErrorEncoder) -> ResponseParts:
    try:
        return 200, task.result(), {}
    except SandboxError as error:
        return of_error(error)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return of_error(PermanentSandboxError("internal error of the server"))


def presented(request: web.Request) -> str:
    """Return the key or secret of a request, or an empty string."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else request.headers.get("X-API-Key", "")


def owner_of(request: web.Request, keys: ApiKeys) -> Owner:
    """Return the owner of the request's key. Raises SecretRefused."""
    if keys.open_to_anyone:
        return ANYONE
    owner = keys.identify(presented(request))
    if owner is None:
        raise SecretRefused("missing or wrong key: send `Authorization: Bearer KEY` with one of the server's --keys")
    return owner


def check_secret(request: web.Request, row: LeasedSandbox) -> None:
    """Check that a request has the sandbox's secret. Raises SecretRefused."""
    if not compare_digest(presented(request).encode(errors="surrogateescape"), row.secret.encode()):
        raise SecretRefused(f"wrong secret for sandbox {row.id}")
