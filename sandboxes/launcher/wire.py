"""Framed JSON messages with file descriptors over a Unix stream socket.

It is used between clients and the launcher, and between the launcher and a sandbox's first process.

Invariants:
- A message is a 4-byte big-endian length followed by that many bytes of JSON; `"fds": n` announces that n descriptors
  come with it.
- `send` owns the descriptors it is given: they are closed once they have been sent or the channel has been closed.
- Nothing blocks: data that the socket does not accept waits in `backlog` until `flush`.
"""

from __future__ import annotations

import array  # noqa: F401 - send_fds imports it late, when the launcher's root has no library folder any more
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

Message = dict[str, Any]

MAX_MESSAGE_BYTES: Final = 8 << 20
_HEADER: Final = struct.Struct("!I")
_RECEIVE_BYTES: Final = 1 << 16
_MAX_DESCRIPTORS: Final = 253
"""SCM_MAX_FD, the maximum number that the kernel sends at once."""


class ChannelClosed(ConnectionError):
    """The other side is gone or violated the framing."""


class Channel:
    """One end of a connection. Not thread-safe."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.socket = stream
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._backlog: deque[tuple[memoryview, list[int]]] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog(self) -> bool:
        """True while data is waiting to be sent; call `flush` when the socket is writable."""
        return bool(self._backlog)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Queue a message and send as much as the socket accepts. Raises ChannelClosed, ValueError (message too
        large)."""
        if descriptors:
            message = {**message, "fds": len(descriptors)}
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            close_all(descriptors)
            raise ValueError(f"message has {len(body)} bytes, more than {MAX_MESSAGE_BYTES}")
        self._backlog.append((memoryview(_HEADER.pack(len(body)) + body), list(descriptors)))
        self.flush()

    def flush(self) -> None:
        while self._backlog:
            data, descriptors = self._backlog[0]
            try:
                sent = socket.send_fds(self.socket, [data], descriptors, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            close_all(descriptors)
            if sent == len(data):
                self._backlog.popleft()
            else:
                self._backlog[0] = (data[sent:], [])

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Return all complete messages, each with its descriptors, which the caller then owns. Raises ChannelClosed at
        the end of the stream, for a message larger than MAX_MESSAGE_BYTES, and for invalid data."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self.socket, _RECEIVE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("end of stream")
        self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ChannelClosed("descriptors were lost or arrived without their messages")
        self._received += data
        messages: list[tuple[Message, list[int]]] = []
        while len(self._received) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._received)
            if size > MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"message has {size} bytes, more than {MAX_MESSAGE_BYTES}")
            end = _HEADER.size + size
            if len(self._received) < end:
                break
            try:
                message = json.loads(bytes(self._received[_HEADER.size : end]))
            except (ValueError, RecursionError) as error:
                raise ChannelClosed(f"message is not valid JSON: {error}") from error
            count = message.pop("fds", 0) if isinstance(message, dict) else None
            if not isinstance(count, int) or count < 0:
                raise ChannelClosed("message is not a JSON object, or its `fds` is not a number of descriptors")
            del self._received[:end]
            if count > len(self._descriptors):
                raise ChannelClosed("descriptors are missing")
            messages.append((message, [self._descriptors.popleft() for _ in range(count)]))
        return messages

    def close(self) -> None:
        for _, descriptors in self._backlog:
            close_all(descriptors)
        self._backlog.clear()
        close_all(self._descriptors)
        self._descriptors.clear()
        self.socket.close()


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
