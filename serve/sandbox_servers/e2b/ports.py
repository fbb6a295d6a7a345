"""Requests to ports inside sandboxes, over HTTP and WebSocket.

A request names a port by the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, or by the host `<port>-<id>.<domain>`.

Invariants:
- A connection is made with a socket of the sandbox's own network, to its loopback interface: no other host and no other
  sandbox can be reached.
- A sandbox that was created secure requires one of its secrets, compared in constant time. The secrets are not passed
  on.
- The requests that run for one sandbox are bounded; a WebSocket counts as one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from headrace.sandboxes.errors import SandboxError, SandboxGone, SpecRefused, Unsupported
from headrace.sandboxes.host.http_relay import ask, forward_web_socket, forwarded, relay_session, stream_back
from headrace.serve.sandbox_servers.e2b.envd import TOKEN_HEADER, Envd, has_secret
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, api_error, not_running
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox

ENVD_PORT: Final = 49983
_CONNECT_S: Final = 10.0
_MAX_PORT: Final = 65535
_HOST: Final = re.compile(r"([^.-]+)-(i[0-9a-f]{20})\.")
_OWN_HEADERS: Final = ("E2b-Sandbox-Id", "E2b-Sandbox-Port")


def named_port(request: web.Request) -> tuple[str, int] | None:
    """Return the sandbox and port that a request names, or None for the control plane and envd. Raises ApiError 400."""
    sandbox_id, text = request.headers.get("E2b-Sandbox-Id", ""), request.headers.get("E2b-Sandbox-Port", "")
    if not (sandbox_id and text):
        match = _HOST.match(request.host)
        if match is None:
            return None
        text, sandbox_id = match[1], match[2]
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= _MAX_PORT):
        raise ApiError(400, f"port {text[:20]!r}: must be a number from 1 to {_MAX_PORT}")
    return None if int(text) == ENVD_PORT else (sandbox_id, int(text))


async def check_domain(domain: str) -> None:
    """Check that the host names of ports resolve; names below localhost need not, because their look-up is left to
    each client (RFC 6761). Raises SpecRefused."""
    name = domain.rpartition(":")[0] or domain
    if name == "localhost" or name.endswith(".localhost"):
        return
    host = f"{ENVD_PORT}-sandbox.{name}"
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError as error:
        raise SpecRefused(f"--domain {domain}: {host} does not resolve ({error}): add a wildcard DNS record") from error


def _secrets(live: LiveSandbox) -> dict[str, str]:
    return {TOKEN_HEADER: live.row.access_token, "E2b-Traffic-Access-Token": live.row.traffic_token}


class Ports:
    """The proxy. `middleware` answers the requests that name a port, and resumes the sandboxes of others."""

    def __init__(self, sandboxes: Sandboxes, envd: Envd) -> None:
        self._sandboxes = sandboxes
        self._envd = envd

    @property
    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        @web.middleware
        async def answer_for_ports(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            try:
                named = named_port(request)
                if named is not None:
                    return await self._answer(request, *named)
                try:
                    await self._envd.wake(request)
                except SandboxError as error:
                    raise api_error(error) from error
                return await handler(request)
            except ApiError as error:
                return error.response()

        return answer_for_ports

    async def _answer(self, request: web.Request, sandbox_id: str, port: int) -> web.StreamResponse:
        asleep = self._sandboxes.sleeping_one(sandbox_id)
        live = asleep or self._sandboxes.running_one(sandbox_id)
        # Both are compared, whatever the first says: the time taken does not tell which was wrong.
        given = [has_secret(request, header, secret) for header, secret in _secrets(live).items()]
        if live.row.secure and not any(given):
            raise ApiError(
                403, "this sandbox was created secure: send its token in the header e2b-traffic-access-token"
            )
        try:
            await self._sandboxes.wake(live)
            with live.port_request():
                for address in ("127.0.0.1", "[::1]"):
                    try:
                        return await self._connect(request, live, address, port)
                    except Unsupported:
                        raise
                    except (aiohttp.ClientConnectorError, SpecRefused):
                        # Nothing listens there, or the kernel has no IPv6.
                        continue
                    except aiohttp.ServerTimeoutError as error:
                        raise ApiError(504, f"port {port} in this sandbox accepted no connection") from error
                    except aiohttp.ClientError as error:
                        # After the connection was made, so that a repetition could repeat an effect.
                        raise ApiError(502, f"port {port} in this sandbox closed the connection: {error}") from error
        except SandboxGone as error:
            self._sandboxes.forget(live)
            raise not_running(sandbox_id) from error
        except SandboxError as error:
            raise api_error(error) from error
        raise ApiError(502, f"nothing listens on {port} in this sandbox")

    async def _connect(self, request: web.Request, live: LiveSandbox, address: str, port: int) -> web.StreamResponse:
        """Pass the request on to one address. Raises aiohttp.ClientConnectorError if nothing listens there."""
        with await live.handle.tcp_socket(ipv6=":" in address) as opened:
            connector = aiohttp.TCPConnector(socket_factory=lambda _: opened, limit=1, force_close=True)
            async with relay_session(connector, connect_s=_CONNECT_S) as session:
                headers = forwarded(request.headers)
                for name in _OWN_HEADERS:
                    headers.popall(name, None)
                secrets = _secrets(live)
                for name in secrets:
                    if headers.get(name) in secrets.values():
                        headers.popall(name)
                # Servers that check the host, or make links with it, know the name that the client used.
                headers["Host"] = request.host
                url = URL(f"http://{address}:{port}{request.raw_path}", encoded=True)
                if request.headers.get("Upgrade", "").lower() == "websocket":
                    return await forward_web_socket(request, session, url, headers)
                return await stream_back(request, await ask(request, session, url, headers))
