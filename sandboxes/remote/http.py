"""HTTP client of the `remote` provider, with two connection pools, a silence timeout and retries.

Invariants:
- Kills, renewals and lists have their own connections, so that they are never delayed by commands that occupy all the
  others.
- Only idempotent requests are repeated, only after ProviderUnreachable, and according to the retry table.
- Every failure without a typed answer (lost connection, 502, 503, 504, silence) is ProviderUnreachable: its effect on
  the server is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import orjson

from headrace.buffer.primitives.trace_context import trace_headers
from headrace.sandboxes.errors import PermanentSandboxError, ProviderUnreachable, SandboxGone
from headrace.sandboxes.remote.error_documents import from_document
from headrace.sandboxes.remote.tunnel import MAX_MESSAGE_BYTES
from headrace.sandboxes.retry import RetryConfig, asking_again

TEARDOWN_CONNECTIONS: Final = 16
_CONNECT_S: Final = 10.0
_HEARTBEAT_S: Final = 10.0
_NO_ANSWER: Final = (502, 503, 504)


class NotConnected(ProviderUnreachable):
    """The connection could not be opened, so no request was sent."""


class RemoteHttp:
    """HTTP client for exec servers; `close` it after use."""

    def __init__(self, *, connections: int, silence_s: float, retries: RetryConfig) -> None:
        self._sizes = {False: connections, True: TEARDOWN_CONNECTIONS}
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._silence_s = silence_s
        self._retries = retries
        self._closed = False

    async def call(
        self,
        method: str,
        url: str,
        secret: str,
        *,
        body: Any = None,
        content: Callable[[], Any] | None = None,
        query: Mapping[str, str] | None = None,
        repeatable: bool = False,
        teardown: bool = False,
    ) -> Any:
        """Return the JSON document, or the bytes, of the response. `body` is sent as JSON; `content` creates a raw
        body, a new one for each attempt.

        Raises the typed error of the response, ProviderUnreachable, and SandboxGone once this client has been
        closed."""
        encoded = None if body is None else orjson.dumps(body)
        data = content if content is not None else lambda: encoded
        send = self._once, method, url, secret, data, query, teardown
        if not repeatable:
            return await self._once(*send[1:])
        return await asking_again(self._retries)(self._once, *send[1:])

    async def _once(
        self,
        method: str,
        url: str,
        secret: str,
        data: Callable[[], Any],
        query: Mapping[str, str] | None,
        teardown: bool,
    ) -> Any:
        import aiohttp

        if self._closed:
            raise SandboxGone("this provider was closed")
        if (session := self._sessions.get(teardown)) is None:
            connector = aiohttp.TCPConnector(limit=self._sizes[teardown])
            # No total timeout: a command may take hours, but its server is never silent for long.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s)
            session = self._sessions[teardown] = aiohttp.ClientSession(connector=connector, timeout=timeout)
        headers = trace_headers() | ({"Authorization": f"Bearer {secret}"} if secret else {})
        try:
            async with session.request(
                method, url, data=data(), params=query, headers=headers, allow_redirects=False
            ) as response:
                return _read(await response.read(), response.status, url)
        except aiohttp.InvalidURL as error:
            raise PermanentSandboxError(f"{url} is not a valid URL of an exec server") from error
        except aiohttp.ClientConnectorError as error:
            raise NotConnected(f"{method} {url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ProviderUnreachable(f"{method} {url}: {error or type(error).__name__}") from error

    @asynccontextmanager
    async def socket(
        self, url: str, secret: str, query: Mapping[str, str], *, heartbeat: bool = True
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket and check its first message. It uses a connection outside both pools. With a heartbeat it
        ends when the server is silent, or when its messages are not read. Raises the typed error of the first message,
        ProviderUnreachable."""
        import aiohttp

        headers = trace_headers() | {"Authorization": f"Bearer {secret}"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(
                    url,
                    params=query,
                    headers=headers,
                    heartbeat=_HEARTBEAT_S if heartbeat else None,
                    max_msg_size=MAX_MESSAGE_BYTES,
                ) as socket,
            ):
                first = await socket.receive()
                if first.type is not aiohttp.WSMsgType.TEXT:
                    raise ProviderUnreachable(f"{url}: the server ended the tunnel")
                document = orjson.loads(first.data)
                if "error" in document:
                    raise from_document(document)
                yield socket
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ProviderUnreachable(f"{url}: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Close all connections. Idempotent. Running requests end with ProviderUnreachable."""
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))


def _read(body: bytes, status: int, url: str) -> Any:
    text = body.lstrip(b" ")
    if status == 200 and text.startswith(b"="):
        return text[1:]
    try:
        document = orjson.loads(text)
    except ValueError:
        document = None
    if isinstance(document, dict) and "error" in document:
        raise from_document(document)
    if status == 200 and isinstance(document, dict):
        return document
    if status == 200 or status in _NO_ANSWER:
        raise ProviderUnreachable(f"{url} returned {status} without a valid response from an exec server")
    raise PermanentSandboxError(f"{url} returned {status}: no exec server is running there (`headrace serve sandbox`)")
