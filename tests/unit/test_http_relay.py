"""The relay of HTTP and WebSockets between real servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.host.http_relay import ask, forward_web_socket, forwarded, relay_session, stream_back

WAIT_S = 30
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[URL]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield URL(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def relayed(service: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, URL]]:
    """Yield a client, and the URL of a relay to the service."""
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serving(service))
        session = await stack.enter_async_context(relay_session(aiohttp.TCPConnector(limit=0)))

        async def relay(request: web.Request) -> web.StreamResponse:
            url = URL(f"{str(behind).rstrip('/')}{request.raw_path}", encoded=True)
            headers = forwarded(request.headers)
            if request.headers.get("Upgrade") == "websocket":
                return await forward_web_socket(request, session, url, headers)
            return await stream_back(request, await ask(request, session, url, headers))

        front = await stack.enter_async_context(serving(relay))
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield client, front


async def test_method_path_headers_and_body_arrive_and_those_of_the_connection_do_not() -> None:
    seen: list[tuple[str, str, CIMultiDict[str], bytes]] = []

    async def service(request: web.Request) -> web.StreamResponse:
        seen.append((request.method, request.raw_path, CIMultiDict(request.headers), await request.read()))
        headers = {"Set-Cookie": "a=b", "X-One": "1", "Connection": "x-hop", "X-Hop": "1", "Content-Encoding": "gzip"}
        return web.Response(status=418, reason="Tea", body=b"not really gzip", headers=headers)

    async with relayed(service) as (client, url):
        sent = {"X-Two": "2", "X-Private": "p", "Connection": "keep-alive, X-Private", "TE": "trailers"}
        target = URL(f"{str(url).rstrip('/')}/a%2Fb/%2e?q=%20", encoded=True)
        skipped = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
        for _ in range(2):
            async with client.request("PATCH", target, headers=sent, data=b"body", skip_auto_headers=skipped) as answer:
                assert (answer.status, answer.reason, await answer.read()) == (418, "Tea", b"not really gzip")
                assert answer.headers["Content-Encoding"] == "gzip"
                assert "X-Hop" not in answer.headers
        # The second time without the cookie of the first: clients do not share them.
        for method, path, headers, body in seen:
            assert (method, path, body) == ("PATCH", "/a%2Fb/%2e?q=%20", b"body")
            assert {name.lower() for name in headers} - {"content-length", "transfer-encoding"} == {"host", "x-two"}


async def test_pieces_arrive_before_the_answer_is_complete() -> None:
    read = asyncio.Event()

    async def service(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await read.wait()
        await response.write(b"second")
        return response

    async with relayed(service) as (client, url), asyncio.timeout(WAIT_S), client.get(url) as answer:
        assert await answer.content.readany() == b"first"
        read.set()
        assert await answer.read() == b"second"


async def test_a_request_body_is_answered_before_it_is_complete() -> None:
    answered = asyncio.Event()

    async def service(request: web.Request) -> web.StreamResponse:
        first = await request.content.readany()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(first)
        await response.write(await request.read())
        return response

    async def body() -> AsyncIterator[bytes]:
        yield b"first"
        await answered.wait()
        yield b"second"

    async with relayed(service) as (client, url), asyncio.timeout(WAIT_S), client.post(url, data=body()) as answer:
        assert await answer.content.readany() == b"first"
        answered.set()
        assert await answer.read() == b"second"


async def test_a_slow_reader_slows_the_service() -> None:
    piece, pieces, sent = bytes(1 << 16), 1600, 0

    async def service(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(pieces):
            await response.write(piece)
            sent += len(piece)
        return response

    received = most = 0
    async with relayed(service) as (client, url), client.get(url) as answer:
        while data := await answer.content.readany():
            received += len(data)
            for _ in range(20):
                # The service and the relay run on as far as they may.
                await asyncio.sleep(0)
            most = max(most, sent - received)
    assert received == sent == pieces * len(piece)
    assert most < sent / 3


async def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    async def service(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with relayed(service) as (client, url), asyncio.timeout(WAIT_S):
        with pytest.raises(aiohttp.ClientError):
            async with client.get(url) as answer:
                await answer.read()


async def test_the_request_to_the_service_ends_when_the_client_disconnects() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def service(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with relayed(service) as (client, url), asyncio.timeout(WAIT_S):
        asking = asyncio.create_task(client.get(url).__aenter__())
        await began.wait()
        asking.cancel()
        await ended.wait()


async def echo(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse(protocols=("two", "one"), max_msg_size=0)
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.TEXT and message.data == "close":
            await socket.close(code=4321, message=b"why")
        elif message.type is WSMsgType.TEXT and message.data == "abort":
            assert request.transport is not None
            request.transport.abort()
        elif message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    return socket


async def test_messages_of_a_web_socket_protocol_and_close_code_are_passed_on() -> None:
    async with (
        relayed(echo) as (client, url),
        asyncio.timeout(WAIT_S),
        client.ws_connect(url, protocols=("one", "none")) as socket,
    ):
        assert socket.protocol == "one"
        await socket.send_str("text\N{SNOWMAN}")
        assert await socket.receive_str() == "text\N{SNOWMAN}"
        await socket.send_bytes(bytes(1 << 20))
        assert await socket.receive_bytes() == bytes(1 << 20)
        await socket.send_str("close")
        closed = await socket.receive()
        assert (closed.type, closed.data, closed.extra) == (WSMsgType.CLOSE, 4321, "why")


@pytest.mark.parametrize("end", ["abort", "large"])
async def test_a_web_socket_ends_when_its_service_or_a_message_ends_it(end: str) -> None:
    async with (
        relayed(echo) as (client, url),
        asyncio.timeout(WAIT_S),
        client.ws_connect(url, max_msg_size=0) as socket,
    ):
        if end == "abort":
            await socket.send_str("abort")
        else:
            with suppress(ConnectionError):
                # The relay does not read all of it.
                await socket.send_bytes(bytes((32 << 20) + 1))
        assert (await socket.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)


async def test_a_service_that_refuses_the_handshake_answers_with_its_status() -> None:
    async def service(request: web.Request) -> web.StreamResponse:
        return web.Response(status=403)

    async with relayed(service) as (client, url):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(url)
        assert refused.value.status == 403
