"""Asyncio client of a launcher, with concurrent requests over one connection per process and endpoint.

Invariants:
- Every request ends: with the launcher's answer, with its typed error, or with LauncherGone when the connection ends.
- Cancelling a request also cancels it in the launcher: its command's process tree is killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.sandboxes.errors import LauncherGone, SpecRefused, error_from_name
from headrace.sandboxes.launcher.wire import Channel, ChannelClosed, Message, close_all


@dataclass(frozen=True, slots=True)
class Exchange:
    """Request in progress. `started` resolves to the pid of a spawned process; `answer` comes last and holds the answer
    or an error. Whoever receives an answer with `descriptors` owns them."""

    request_id: int
    message: Message
    started: asyncio.Future[int]
    answer: asyncio.Future[Message]

    def sandbox_fields(self) -> Message:
        """Return the fields by which a later message identifies the same sandbox."""
        return {"sandbox": self.message["sandbox"], "secret": self.message["secret"]}

    def fail(self, error: Exception) -> None:
        for future in (self.started, self.answer):
            if not future.done():
                future.set_exception(error)
                # Mark the error as retrieved, in case no caller waits any more.
                future.exception()


class LauncherClient:
    """One connection to a launcher. Use `LauncherConnections` to share it."""

    def __init__(self, endpoint: str, channel: Channel) -> None:
        self.endpoint = endpoint
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Exchange] = {}
        self._last_id = 0
        self._last_receive_s = self._loop.time()
        self.closed = False
        self._loop.add_reader(channel.fileno(), self._on_readable)

    @classmethod
    async def connect(cls, endpoint: str) -> LauncherClient:
        """Connect to the launcher at `endpoint`. Raises LauncherGone if no launcher is listening there."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        stream.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(stream, endpoint)
        except OSError as error:
            stream.close()
            raise LauncherGone(f"no launcher is listening at {endpoint}: {error}") from error
        return cls(endpoint, Channel(stream))

    async def request(
        self, message: Message, descriptors: Sequence[int] = (), *, patience_s: float | None = None
    ) -> Message:
        """Send a message, taking ownership of `descriptors`, and wait for the answer. Raises the answer's typed error,
        LauncherGone, and TimeoutError if the launcher sends nothing at all, to this request or any other, for
        `patience_s`."""
        exchange = self.begin(message, descriptors)
        try:
            while True:
                asked_s = self._loop.time()
                try:
                    async with asyncio.timeout(patience_s):
                        return await asyncio.shield(exchange.answer)
                except TimeoutError:
                    if self._last_receive_s < asked_s:
                        raise
        except asyncio.CancelledError:
            self.cancel(exchange)
            raise
        finally:
            self._waiting.pop(exchange.request_id, None)

    def begin(self, message: Message, descriptors: Sequence[int] = ()) -> Exchange:
        """Send a message without waiting, taking ownership of `descriptors`. Raises LauncherGone, SpecRefused (message
        too large)."""
        if self.closed:
            close_all(descriptors)
            raise LauncherGone(f"the connection to the launcher at {self.endpoint} is closed")
        self._last_id += 1
        exchange = Exchange(self._last_id, message, self._loop.create_future(), self._loop.create_future())
        self._waiting[exchange.request_id] = exchange
        try:
            self._send({**message, "id": exchange.request_id}, descriptors)
        except ValueError as error:
            del self._waiting[exchange.request_id]
            raise SpecRefused(f"the request is too large; write the data to files instead: {error}") from error
        return exchange

    def cancel(self, exchange: Exchange) -> None:
        """Abandon a request; its command's process tree is killed."""
        if self.closed or "sandbox" not in exchange.message:
            return
        self._send({"op": "cancel", "target": exchange.request_id, "id": 0, **exchange.sandbox_fields()})

    def post(self, message: Message) -> None:
        """Send a message whose answer is ignored."""
        if not self.closed:
            self._send({**message, "id": 0})

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, descriptors)
        except ChannelClosed:
            self.close()
            return
        if self._channel.backlog:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        try:
            self._channel.flush()
        except ChannelClosed:
            self.close()
            return
        if not self._channel.backlog:
            self._loop.remove_writer(self._channel.fileno())

    def _on_readable(self) -> None:
        try:
            messages = self._channel.receive()
        except ChannelClosed:
            self.close()
            return
        self._last_receive_s = self._loop.time()
        for message, descriptors in messages:
            request_id = int(message.pop("id", 0))
            exchange = self._waiting.get(request_id)
            if exchange is None or exchange.answer.done():
                close_all(descriptors)
            elif "started" in message:
                exchange.started.set_result(int(message["started"]))
            else:
                del self._waiting[request_id]
                if "error" in message:
                    close_all(descriptors)
                    exchange.fail(error_from_name(str(message["error"]), str(message.get("message", ""))))
                else:
                    exchange.answer.set_result({**message, "descriptors": descriptors} if descriptors else message)

    def close(self) -> None:
        """Close the connection; every waiting request ends with LauncherGone. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        waiting, self._waiting = self._waiting, {}
        for exchange in waiting.values():
            exchange.fail(LauncherGone(f"the launcher at {self.endpoint} died, and so did its sandboxes"))


class LauncherConnections:
    """One connection per endpoint, opened on first use and reopened if it is lost; `close` closes all of them."""

    def __init__(self) -> None:
        self._clients: dict[str, LauncherClient] = {}
        self._connecting = asyncio.Lock()

    async def get(self, endpoint: str) -> LauncherClient:
        client = self._clients.get(endpoint)
        if client is not None and not client.closed:
            return client
        async with self._connecting:
            client = self._clients.get(endpoint)
            if client is None or client.closed:
                client = self._clients[endpoint] = await LauncherClient.connect(endpoint)
            return client

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def open_null() -> int:
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
