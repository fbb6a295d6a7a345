"""Bytes between two TCP connections over a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.remote.tunnel import carry

WAIT_S = 30
Service = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tunnelled(
    service: Service,
) -> AsyncIterator[Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]]:
    """Yield a function that connects to the service through a WebSocket."""
    async with AsyncExitStack() as stack:
        arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        listener = await asyncio.start_server(lambda *pair: arrived.put_nowait(pair), "127.0.0.1", 0)
        stack.callback(listener.close)
        behind = await asyncio.start_server(service, "127.0.0.1", 0)
        stack.callback(behind.close)

        async def handle(request: web.Request) -> web.StreamResponse:
            socket = web.WebSocketResponse(compress=False)
            await socket.prepare(request)
            await carry(socket, *await arrived.get())
            await socket.close()
            return socket

        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        group = await stack.enter_async_context(asyncio.TaskGroup())

        async def dial() -> None:
            async with client.ws_connect(f"http://127.0.0.1:{runner.addresses[0][1]}") as socket:
                await carry(socket, *await asyncio.open_connection(*behind.sockets[0].getsockname()))

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            group.create_task(dial())
            return await asyncio.open_connection(*listener.sockets[0].getsockname())

        async with asyncio.timeout(WAIT_S):
            yield connect


async def test_the_end_of_one_direction_leaves_the_other_open() -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        everything = await reader.read()
        writer.write(everything[::-1])
        writer.close()

    async with tunnelled(service) as connect:
        reader, writer = await connect()
        sent = bytes(range(256)) * 10_000
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent[::-1]
        writer.close()


async def test_the_service_may_end_its_direction_first() -> None:
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.write_eof()
        received.set_result(await reader.read())
        writer.close()

    async with tunnelled(service) as connect:
        reader, writer = await connect()
        assert await reader.read() == b"hello"
        writer.write(b"late")
        writer.write_eof()
        assert await received == b"late"
        writer.close()


async def test_a_connection_that_breaks_breaks_the_other_side() -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.transport.abort()

    async with tunnelled(service) as connect:
        reader, writer = await connect()
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()


async def test_the_service_is_told_when_the_client_breaks() -> None:
    ended = asyncio.Event()

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        while await reader.read(1 << 16):
            pass
        ended.set()
        writer.close()

    async with tunnelled(service) as connect:
        reader, writer = await connect()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.transport.abort()
        await ended.wait()


async def test_a_slow_reader_slows_the_service_and_delays_nobody_else() -> None:
    total, sent = 64 << 20, 0

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if await reader.readexactly(1) == b"1":
            writer.write(b"at once")
        else:
            while sent < total:
                writer.write(bytes(1 << 16))
                await writer.drain()
                sent += 1 << 16
        writer.close()

    async with tunnelled(service) as connect:
        slow, slow_writer = await connect()
        slow_writer.write(b"0")
        await slow.readexactly(1 << 16)
        for _ in range(20):
            reader, writer = await connect()
            writer.write(b"1")
            assert await reader.read() == b"at once"
            writer.close()
        assert sent < total / 2
        assert len(await slow.readexactly(total - (1 << 16))) == total - (1 << 16)
        assert await slow.read() == b""
        slow_writer.close()


async def test_many_connections_are_carried_at_once() -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async with tunnelled(service) as connect:

        async def echo(number: int) -> bytes:
            reader, writer = await connect()
            writer.write(bytes([number]) * 100_000)
            writer.write_eof()
            received = await reader.read()
            writer.close()
            return received

        assert await asyncio.gather(*map(echo, range(50))) == [bytes([n]) * 100_000 for n in range(50)]
