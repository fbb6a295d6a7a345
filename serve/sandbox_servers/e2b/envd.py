"""Common parts of envd's handlers: finding a request's sandbox, its access token and its user.

Invariants:
- The sandbox is named by `E2b-Sandbox-Id` or by the host name `<port>-<id>.<domain>`. For a dead or paused sandbox the
  response is 502 with `was not found`, which the SDKs recognise.
- Every route except `/health` requires the sandbox's access token, compared in constant time; `/files` accepts a
  signature made with it instead.
- A call ends within its `Connect-Timeout-Ms`; an error after the start of a stream is sent in its end frame.
- The key is checked first. A sandbox that belongs to another key results in 404, like one that does not exist. Every
  error is a JSON object with `code` and `message`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from headrace.sandboxes.errors import SandboxError, SandboxGone
from headrace.serve.sandbox_servers.e2b.connect_protocol import (
    Message,
    ResponseStream,
    check_stream,
    deadline_s,
    read_unary,
)
from headrace.serve.sandbox_servers.e2b_state.entries import Account
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, Code, RpcError, api_error, not_running, rpc_error
from headrace.serve.sandbox_servers.e2b_state.keys import ApiKeys, Owner
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox

if TYPE_CHECKING:
    from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes

    Unary = Callable[["Call", Message], Awaitable[Message]]
    Streaming = Callable[["Call", ResponseStream], Awaitable[None]]
    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    OwnerHandler = Callable[[web.Request, Owner], Awaitable[web.StreamResponse]]
    SandboxHandler = Callable[[web.Request, LiveSandbox], Awaitable[web.StreamResponse]]

TOKEN_HEADER: Final = "X-Access-Token"
_KEEPALIVE_S: Final = 90.0
"""Interval between keep-alive messages on an idle stream, unless the client sends `Keepalive-Ping-Interval`."""
_UNARY_TIMEOUT_S: Final = 300.0


class Authentication:
    """Converts our handlers to aiohttp handlers."""

    def __init__(self, sandboxes: Sandboxes, keys: ApiKeys) -> None:
        self._sandboxes = sandboxes
        self._keys = keys

    def owned(self, handler: OwnerHandler) -> Handler:
        """Wrap the handler of a route that requires any valid key."""

        async def wrapped(request: web.Request) -> web.StreamResponse:
            try:
                owner = self._keys.identify(request.headers.get("X-API-Key", ""))
                if owner is None:
                    raise ApiError(401, "missing or wrong API key: set E2B_API_KEY")
                return await handler(request, owner)
            except ApiError as error:
                return error.response()
            except SandboxError as error:
                return api_error(error, repeatable="Idempotency-Key" in request.headers).response()

        return wrapped

    def on_sandbox(self, handler: SandboxHandler) -> Handler:
        """Wrap the handler of a route for one sandbox, which must belong to the owner of the key."""

        async def wrapped(request: web.Request, owner: Owner) -> web.StreamResponse:
            live = self._sandboxes.get(owner, request.match_info["id"])
            try:
                return await handler(request, live)
            except SandboxGone:
                self._sandboxes.forget(live)
                raise

        return self.owned(wrapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to envd's Connect services."""

    request: web.Request
    live: LiveSandbox
    user: str
    timeout_s: float | None
    keepalive_s: float

    async def account(self) -> Account:
        """Return the account of the call's user. Raises RpcError (the user is unknown), SandboxError."""
        return await self.live.accounts.find(self.user)


def has_secret(request: web.Request, header: str, secret: str) -> bool:
    """Return True if the header contains the secret, compared in constant time."""
    return compare_digest(request.headers.get(header, "").encode(errors="surrogateescape"), secret.encode())


def _has_token(request: web.Request, live: LiveSandbox) -> bool:
    return has_secret(request, TOKEN_HEADER, live.row.access_token)


class Envd:
    """Converts methods of envd's services to aiohttp handlers."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    def find(self, request: web.Request) -> LiveSandbox:
        """Find a request's sandbox. Raises ApiError 400 (the request names none) or 502 (the sandbox is dead)."""
        name = request.headers.get("E2b-Sandbox-Id", "")
        if not name:
            _, dash, rest = request.host.partition("-")
            name = rest.partition(".")[0] if dash else ""
        if not name:
            raise ApiError(400, "no sandbox is named: send the header E2b-Sandbox-Id")
        return self._sandboxes.running_one(name)

    def open(self, request: web.Request) -> LiveSandbox:
        """Find a request's sandbox and check its token. Raises ApiError 401 and the errors of `find`."""
        live = self.find(request)
        if not _has_token(request, live):
            raise ApiError(401, "unauthorized access, please provide a valid access token")
        return live

    async def wake(self, request: web.Request) -> None:
        """Resume the sandbox of a request that has its token. Raises SandboxError."""
        live = self._sandboxes.sleeping_one(request.headers.get("E2b-Sandbox-Id", ""))
        if live is not None and request.path != "/health" and _has_token(request, live):
            await self._sandboxes.wake(live)

    def gone(self, live: LiveSandbox) -> ApiError:
        """Forget a sandbox that the provider reports as dead, and return the error for the client."""
        self._sandboxes.forget(live)
        return not_running(live.row.id)

    def _call(self, request: web.Request) -> Call:
        live = self.open(request)
        interval = request.headers.get("Keepalive-Ping-Interval", "")
        scheme, _, value = request.headers.get("Authorization", "").partition(" ")
        user = ""
        if scheme.lower() == "basic":
            try:
                user = base64.b64decode(value, validate=True).decode().partition(":")[0]
            except ValueError as error:
                raise RpcError(Code.UNAUTHENTICATED, "Authorization: not Basic base64(user:)") from error
        keepalive_s = float(interval) if interval.isascii() and interval.isdigit() and len(interval) < 6 else 0.0
        return Call(
            request=request,
            live=live,
            user=user,
            timeout_s=deadline_s(request),
            keepalive_s=keepalive_s or _KEEPALIVE_S,
        )

    def unary(self, method: Unary) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return the handler for a unary method."""

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                call = self._call(request)
                message = await read_unary(request)
                async with asyncio.timeout(call.timeout_s or _UNARY_TIMEOUT_S):
                    return web.json_response(await self._answer(call, method(call, message)))
            except TimeoutError:
                return RpcError(Code.DEADLINE_EXCEEDED, "Connect-Timeout-Ms has passed").response()
            except (RpcError, ApiError) as error:
                return error.response()

        return handler

    def streaming(self, method: Streaming) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return the handler for a method with a stream on either side; `method` opens the response stream."""

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                check_stream(request)
                call = self._call(request)
            except (RpcError, ApiError) as error:
                return error.response()
            stream = ResponseStream(request)
            try:
                await self._answer(call, method(call, stream))
            except TimeoutError:
                return await stream.end(RpcError(Code.DEADLINE_EXCEEDED, "Connect-Timeout-Ms has passed"))
            except RpcError as error:
                return await stream.end(error)
            except ApiError as error:
                return await stream.end(RpcError(Code.UNAVAILABLE, error.message))
            return await stream.end()

        return handler

    async def _answer(self, call: Call, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except SandboxGone as error:
            raise self.gone(call.live) from error
        except SandboxError as error:
            raise rpc_error(error, call.live.row.id) from error

    async def health(self, request: web.Request) -> web.Response:
        """Respond with 204 while the sandbox is running."""
        try:
            live = self.find(request)
            ref = live.row.ref
            infos = await self._sandboxes.backend.list()
            if ref is None or not any(info.id == ref.id for info in infos):
                raise self.gone(live)
        except ApiError as error:
            return error.response()
        except SandboxError as error:
            return ApiError(503, error.message).response()
        return web.Response(status=204)
