"""Client of the control API.

Invariants:
- Requests that may be repeated are repeated while the API or the service behind it is away, for up to `patience_s`. A
  submission is repeated under one key, so it makes one run. (`resume` is not repeated.)
- A stream of events is resumed by the last number that was seen, so each event is yielded once and in order. It ends
  when the run has ended, never because a connection was cut.
- The API's errors are raised as the errors that they were in the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypeVar
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import TypeAdapter
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from headrace.actors.cluster.api.refusals import error_of
from headrace.actors.cluster.runs.contract import RUN, Method
from headrace.actors.cluster.runs.operations import IDEMPOTENCY_KEY, operation_of
from headrace.actors.cluster.runs.records import RunEvent, RunId
from headrace.actors.errors import ActorLost, ApiRefused, ConfigError
from headrace.actors.runtime.actors.event_stream import AGAIN_S, END, POLL_S
from headrace.sandboxes.host.key_files import read_private

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_S: Final = 120.0
"""Default time for which the API may be away: a head with Redis is back after 30 to 60 s, its API 15 s later."""
_REQUEST_S: Final = 60.0
_CONNECT_S: Final = 10.0
_QUIET_S: Final = 3 * POLL_S
"""Time without a byte after which a stream of events counts as lost."""
_TOO_LONG_LINE: Final = 1 << 20
_EVENT: Final = TypeAdapter(RunEvent)


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of a stream of events; `number` is None for one without an id."""

    kind: str
    number: int | None
    data: str


def read_key(path: Path) -> str:
    """Read a key from a private file. Raises ConfigError, SecretRefused."""
    key = read_private(path, "--key-file", longest=4096).strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"--key-file {path} must have one key on one line")
    return key


class ControlClient:
    """Client for one API and key; an async context manager. Every method raises ActorLost if there is no answer within
    `patience_s`, and the errors of `actors.errors` that the API answers."""

    def __init__(self, url: str, key: str, *, patience_s: float = PATIENCE_S) -> None:
        """Raise ConfigError for an invalid URL."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must begin with http:// or https://")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._patience_s = patience_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, read_bufsize=_TOO_LONG_LINE)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """See `RunsClient.ask`."""
        operation = operation_of(method)
        given = operation.bound(*arguments, **named)
        places = {place: quote(str(given.pop(name)), safe="") for name, place in operation.in_path.items()}
        key = given.pop(IDEMPOTENCY_KEY, None)
        query = {name: str(value) for name, value in given.items() if value not in (None, "")}
        once = partial(
            self._once,
            operation.method,
            operation.path.format(**places),
            **({"params": query} if operation.has_query else {"data": orjson.dumps(given)}),
            headers=None if key is None else {"Idempotency-Key": key},
            timeout=aiohttp.ClientTimeout(_REQUEST_S + operation.wait_s(given), sock_connect=_CONNECT_S),
        )
        content = await (self._attempts()(once) if operation.repeatable else once())
        try:
            document = orjson.loads(content)
            result: R = operation.result.validate_python(document[operation.key] if operation.key else document)
        except (KeyError, TypeError, ValueError) as error:
            raise ApiRefused(f"--url {self._url} does not answer as the control API of headrace: check it") from error
        return result

    async def events(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[RunEvent, None]:
        """See `RunsClient.events`."""
        while True:
            # Each connection has the whole patience, however long the run takes.
            async for attempt in self._attempts():
                with attempt:
                    response = await self._open_stream(run_id, after)
            async with response:
                if response.status == 204:
                    return
                before = after
                # It may be cut at any byte: the replica or the proxy is gone.
                with suppress(aiohttp.ClientError, TimeoutError):
                    async for message in _messages(response):
                        if message.kind == END:
                            return
                        if message.number is not None:
                            event = _EVENT.validate_json(message.data)
                            after = message.number
                            yield event
                if after == before:
                    await asyncio.sleep(AGAIN_S)

    async def _open_stream(self, run_id: str, after: int) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_QUIET_S)
        headers = {"Last-Event-ID": str(after)} if after else {}
        try:
            url = self._url + RUN.format(run=quote(run_id, safe="")) + "/events"
            response = await self._session.get(url, headers=headers, timeout=timeout)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _lost(self._url, error) from error
        if response.status not in (200, 204):
            async with response:
                raise _error_in(response.status, await response.read())
        return response

    def _attempts(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(ActorLost),
            wait=wait_random_exponential(multiplier=0.2, max=2.0),
            stop=stop_after_delay(self._patience_s),
            reraise=True,
        )

    async def _once(self, method: str, path: str, **options: Any) -> bytes:
        """Return the answer to a request. Raises the error that it is."""
        try:
            async with self._session.request(method, self._url + path, **options) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _lost(self._url, error) from error
        if response.status not in (200, 201):
            raise _error_in(response.status, content)
        return content


def _lost(url: str, error: BaseException) -> ActorLost:
    reason = str(error) or type(error).__name__
    return ActorLost(f"{url} does not answer ({reason}): check --url, and whether the head of the cluster is up")


def _error_in(status: int, content: bytes) -> Exception:
    """Return the error of an answer, which may come from Serve's proxy instead of the API."""
    try:
        error = orjson.loads(content)["error"]
        return error_of(status, str(error["code"]), str(error["message"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return error_of(status, "", f"status {status}: {content[:200].decode(errors='replace')}")


async def _messages(response: aiohttp.ClientResponse) -> AsyncIterator[_Message]:
    """Yield the complete messages of a stream of events; comments and other fields are left out."""
    kind, number, data = "message", None, ""
    async for raw in response.content:
        if not raw.endswith(b"\n"):
            # The stream was cut in this line.
            return
        field, _, value = raw.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if raw.strip(b"\r\n"):
            match field:
                case "id":
                    number = int(value)
                case "event":
                    kind = value
                case "data":
                    data = value
            continue
        if data:
            yield _Message(kind, number, data)
        kind, number, data = "message", None, ""
