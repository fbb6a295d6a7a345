"""envd's side of the base URL: which sandbox a request means, whether its token opens it, and as which user it acts.

Invariants:
- The sandbox is named by `E2b-Sandbox-Id` or by the host name `<port>-<id>.<domain>`; one that is dead or paused is
  answered with 502 and `was not found`, by which the SDKs know it.
- Nothing but `/health` is served without the sandbox's own access token, compared in constant time; `/files` takes a
  signature made with it instead.
- A call ends within its `Connect-Timeout-Ms`; an error after a stream began travels in its end frame.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from headrace.sandboxes.errors import SandboxError, SandboxGone
from headrace.serve.e2b.connect_protocol import ResponseStream, check_stream, deadline_s, read_unary
from headrace.serve.e2b_sandboxes.errors import ApiError, Code, RpcError, not_running, rpc_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.serve.e2b.connect_protocol import Message
    from headrace.serve.e2b_sandboxes.accounts import Account
    from headrace.serve.e2b_sandboxes.lifecycle import Sandboxes
    from headrace.serve.e2b_sandboxes.live_sandbox import LiveSandbox

    Unary = Callable[["Call", Message], Awaitable[Message]]
    Streaming = Callable[["Call", ResponseStream], Awaitable[None]]

_KEEPALIVE_S: Final = 90.0
"""Between two signs of life on a quiet stream, where the client names no `Keepalive-Ping-Interval`."""
_UNARY_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of envd's Connect services."""

    request: web.Request
    live: LiveSandbox
    user: str
    timeout_s: float | None
    keepalive_s: float

    async def account(self) -> Account:
        """Raises RpcError (no such user), SandboxError."""
        return await self.live.accounts.find(self.user)


class Envd:
    """Makes aiohttp handlers of methods."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    def find(self, request: web.Request) -> LiveSandbox:
        """Raises ApiError 400 (none named), 502 (dead)."""
        name = request.headers.get("E2b-Sandbox-Id", "")
        if not name:
            _, dash, rest = request.host.partition("-")
            name = rest.partition(".")[0] if dash else ""
        if not name:
            raise ApiError(400, "which sandbox? Send the header E2b-Sandbox-Id")
        return self._sandboxes.running_one(name)

    def open(self, request: web.Request) -> LiveSandbox:
        """The sandbox whose token the request carries. Raises ApiError 401 and those of `find`."""
        live = self.find(request)
        token = request.headers.get("X-Access-Token", "")
        if not compare_digest(token.encode(errors="surrogateescape"), live.row.access_token.encode()):
            raise ApiError(401, "unauthorized access, please provide a valid access token")
        return live

    def gone(self, live: LiveSandbox) -> ApiError:
        """The provider says it is dead."""
        self._sandboxes.forget(live)
        return not_running(live.row.id)

    def _call(self, request: web.Request) -> Call:
        live = self.open(request)
        interval = request.headers.get("Keepalive-Ping-Interval", "")
        keepalive_s = float(interval) if interval.isascii() and interval.isdigit() and len(interval) < 6 else 0.0
        return Call(
            request=request,
            live=live,
            user=_user(request),
            timeout_s=deadline_s(request),
            keepalive_s=keepalive_s or _KEEPALIVE_S,
        )

    def unary(self, method: Unary) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                call = self._call(request)
                message = await read_unary(request)
                async with asyncio.timeout(call.timeout_s or _UNARY_TIMEOUT_S):
                    return web.json_response(await self._answer(call, method(call, message)))
            except TimeoutError:
                return RpcError(Code.DEADLINE_EXCEEDED, "Connect-Timeout-Ms is over").response()
            except (RpcError, ApiError) as error:
                return error.response()

        return handler

    def streaming(self, method: Streaming) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """For methods with a stream on either side; `method` opens the response's."""

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
                return await stream.end(RpcError(Code.DEADLINE_EXCEEDED, "Connect-Timeout-Ms is over"))
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
        """204 while the provider has it running."""
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


def _user(request: web.Request) -> str:
    """The name in `Authorization: Basic base64(name:)`, "" without one. Raises RpcError."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0]
    except ValueError as error:
        raise RpcError(Code.UNAUTHENTICATED, "Authorization: not Basic base64(user:)") from error
