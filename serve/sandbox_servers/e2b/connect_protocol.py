"""The Connect protocol with its JSON codec over HTTP/1.1, as the SDKs use it (connectrpc.com/docs/protocol).

Invariants:
- A frame consists of a flag byte, a four-byte length (big-endian) and JSON. A stream ends with an end frame, which
  contains the error if there is one, or when the connection closes.
- Compression is not used; a message has at most `MAX_MESSAGE_BYTES`.
- A writer waits for its reader: a slow client's unread data is limited by aiohttp's write buffer.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any, Final

import orjson
from aiohttp import web

from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, Code, RpcError

Message = dict[str, Any]

MAX_MESSAGE_BYTES: Final = 8 << 20
_HEADER: Final = struct.Struct(">BI")
_COMPRESSED: Final = 1
_END: Final = 2
_UNARY_TYPE: Final = "application/json"
_STREAM_TYPE: Final = "application/connect+json"


async def read_unary(request: web.Request) -> Message:
    """Return the message of a unary call. Raises RpcError, ApiError (the codec is not JSON)."""
    _check_type(request, _UNARY_TYPE)
    body = await request.content.read(MAX_MESSAGE_BYTES + 1)
    while len(body) <= MAX_MESSAGE_BYTES and (part := await request.content.read(MAX_MESSAGE_BYTES + 1 - len(body))):
        body += part
    if len(body) > MAX_MESSAGE_BYTES:
        raise RpcError(Code.RESOURCE_EXHAUSTED, f"the message is larger than {MAX_MESSAGE_BYTES} bytes")
    return _parse(body)


def check_stream(request: web.Request) -> None:
    """Check the content type of a stream. Raises ApiError unless the request is a Connect stream of JSON."""
    _check_type(request, _STREAM_TYPE)


def _check_type(request: web.Request, wanted: str) -> None:
    if request.content_type != wanted:
        raise ApiError(415, f"content type {request.content_type!r}: this server accepts only {wanted}")


async def read_frames(request: web.Request) -> AsyncIterator[Message]:
    """Yield the messages of a client stream as they arrive. Raises RpcError."""
    while True:
        header = await _read_up_to(request, _HEADER.size)
        if not header:
            return
        if len(header) < _HEADER.size:
            raise RpcError(Code.INVALID_ARGUMENT, "the stream ends inside a frame")
        flags, size = _HEADER.unpack(header)
        if flags & _COMPRESSED:
            raise RpcError(Code.UNIMPLEMENTED, "compressed frames are not supported: send them uncompressed")
        if size > MAX_MESSAGE_BYTES:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"the message is larger than {MAX_MESSAGE_BYTES} bytes")
        body = await _read_up_to(request, size)
        if len(body) < size:
            raise RpcError(Code.INVALID_ARGUMENT, "the stream ends inside a frame")
        if flags & _END:
            # Data after the end frame is left to the connection.
            return
        yield _parse(body)


async def _read_up_to(request: web.Request, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := await request.content.read(size - len(data))):
        data += part
    return data


async def read_single(request: web.Request) -> Message:
    """Return the only message of a server-streaming call. Raises RpcError."""
    async for message in read_frames(request):
        return message
    raise RpcError(Code.INVALID_ARGUMENT, "the request contains no message")


def _parse(body: bytes) -> Message:
    try:
        message = orjson.loads(body or b"{}")
    except ValueError as error:
        raise RpcError(Code.INVALID_ARGUMENT, f"the message is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise RpcError(Code.INVALID_ARGUMENT, "the message is not an object")
    return message


def encode_frame(message: Message, *, end: bool = False) -> bytes:
    body = orjson.dumps(message)
    return _HEADER.pack(_END if end else 0, len(body)) + body


class ResponseStream:
    """The response to a streaming call. `send` waits while the client does not read."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": _STREAM_TYPE})

    async def open(self) -> None:
        await self._response.prepare(self._request)

    async def send(self, message: Message) -> None:
        await self._response.write(encode_frame(message))

    async def end(self, error: RpcError | None = None) -> web.StreamResponse:
        """Close the stream, with or without an error."""
        if not self._response.prepared:
            await self.open()
        await self._response.write(encode_frame({"error": error.to_json()} if error else {}, end=True))
        await self._response.write_eof()
        return self._response


def deadline_s(request: web.Request) -> float | None:
    """Return the timeout given in `Connect-Timeout-Ms`, or None if there is none. Raises RpcError."""
    text = request.headers.get("Connect-Timeout-Ms", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise RpcError(Code.INVALID_ARGUMENT, f"Connect-Timeout-Ms: {text[:20]!r} is not a number of milliseconds")
    return int(text) / 1000 or None
