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
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from headrace.actors.cluster.api.refusals import error_of
from headrace.actors.cluster.runs.contract import LEAVE_S, LogPage, NodeDrained, NodeStatus, Readiness
from headrace.actors.cluster.runs.records import Recipe, RunEvent, RunRecord, run_event, run_record
from headrace.actors.engines.members_file import EngineStatus, engine_status
from headrace.actors.errors import ActorLost, ApiRefused, ConfigError
from headrace.actors.run.node_drain import RunLeft
from headrace.actors.runtime.actors.event_stream import AGAIN_S, END, POLL_S

PATIENCE_S: Final = 120.0
"""Default time for which the API may be away: a head with Redis is back after 30 to 60 s, its API 15 s later."""
_REQUEST_S: Final = 60.0
_CONNECT_S: Final = 10.0
_QUIET_S: Final = 3 * POLL_S
"""Time without a byte after which a stream of events counts as lost."""
_TOO_LONG_LINE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of a stream of events; `number` is None for one without an id."""

    kind: str
    number: int | None
    data: str


def read_key(path: Path) -> str:
    """Read a key from a private file. Raises ConfigError."""
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {path} cannot be read ({error}): name the file with your key") from error
    if mode & 0o077:
        raise ConfigError(f"--key-file {path} has mode {mode:o}, so others can use your key: chmod 600 {path}")
    if not key or not key.isprintable() or " " in key:
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
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=_TOO_LONG_LINE)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def submit(self, name: str, recipe: Recipe, idempotency_key: str) -> RunRecord:
        """Submit a run."""
        headers = {"Idempotency-Key": idempotency_key}
        document = {"name": name, "recipe": recipe}
        return run_record(await self._ask("POST", "/v1/runs", document, headers=headers))

    async def runs(self) -> tuple[RunRecord, ...]:
        """Return the runs of the key's owner, or of all owners for a key of an admin."""
        return tuple(run_record(values) for values in (await self._ask("GET", "/v1/runs"))["runs"])

    async def run(self, run_id: str) -> RunRecord:
        return run_record(await self._ask("GET", _path(run_id)))

    async def status(self, run_id: str) -> dict[str, Any]:
        """Return the document of `headrace status --json`."""
        return await self._ask("GET", _path(run_id, "status"))

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return the document of `headrace report --json`."""
        return await self._ask("GET", _path(run_id, "report"))

    async def drain(self, run_id: str) -> RunRecord:
        return run_record(await self._ask("POST", _path(run_id, "drain")))

    async def stop(self, run_id: str) -> RunRecord:
        return run_record(await self._ask("POST", _path(run_id, "stop")))

    async def resume(self, run_id: str, changes: tuple[str, ...] = ()) -> RunRecord:
        """Queue an ended run again, with changed keys. It is asked once: after a lost answer, a second request would be
        refused."""
        return run_record(await self._once("POST", _path(run_id, "resume"), {"changes": list(changes)}))

    async def upgrade(self, run_id: str) -> RunRecord:
        """Let a live run start again under what is installed."""
        return run_record(await self._ask("POST", _path(run_id, "upgrade")))

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """Return the living nodes of the cluster. Needs a key of an admin."""
        return tuple(map(node_status, (await self._ask("GET", "/v1/nodes"))["nodes"]))

    async def drain_node(self, node: str, deadline_s: float) -> NodeDrained:
        """Let the runs of all owners leave a node. Needs a key of an admin."""
        path, body = f"/v1/nodes/{quote(node, safe='')}/drain", {"deadline_s": deadline_s}
        return node_drained(await self._ask("POST", path, body, answer_s=deadline_s + LEAVE_S))

    async def engines(self, run_id: str) -> tuple[EngineStatus, ...]:
        """Return the engines of a run."""
        return tuple(map(engine_status, (await self._ask("GET", _path(run_id, "engines")))["engines"]))

    async def add_engine(self, run_id: str, url: str, timeout_s: float) -> str:
        """Attach a server to a live run, and return the name of the engine."""
        body = {"url": url, "timeout_s": timeout_s}
        return str((await self._ask("POST", _path(run_id, "engines"), body, answer_s=timeout_s))["engine_id"])

    async def remove_engine(self, run_id: str, engine_id: str, timeout_s: float) -> str:
        """Remove an engine from a live run, and return its name."""
        path, query = _path(run_id, "engines", engine_id), {"timeout_s": str(int(timeout_s))}
        return str((await self._ask("DELETE", path, query=query, answer_s=timeout_s))["engine_id"])

    async def logs(self, run_id: str, *, actor: str | None = None, after: str = "") -> LogPage:
        """Return the next lines of a run's logs, those of one actor or all."""
        query = {key: value for key, value in (("actor", actor), ("after", after)) if value}
        page = await self._ask("GET", _path(run_id, "logs"), query=query)
        return LogPage(lines=tuple(page["lines"]), cursor=page["cursor"])

    async def ready(self, run_id: str) -> Readiness:
        """Return the checks of a run."""
        document = await self._ask("GET", "/readyz", query={"run": run_id}, accept=(200, 503))
        if "error" in document:
            raise error_of(503, document["error"]["code"], document["error"]["message"])
        names = ("ledger_writable", "engine_serving", "learner_in_time")
        return Readiness(**{name: document[name] for name in names}, problems=tuple(document["problems"]))

    async def events(self, run_id: str, *, after: int = 0) -> AsyncGenerator[RunEvent, None]:
        """Yield the events of a run after number `after`, until the run has ended."""
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
                            event = run_event(orjson.loads(message.data))
                            after = message.number
                            yield event
                if after == before:
                    await asyncio.sleep(AGAIN_S)

    async def _open_stream(self, run_id: str, after: int) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_QUIET_S)
        headers = {"Last-Event-ID": str(after)} if after else {}
        try:
            response = await self._session.get(self._url + _path(run_id, "events"), headers=headers, timeout=timeout)
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

    async def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Return the answer to a request that may be repeated; see `_once` for the options."""
        return await self._attempts()(partial(self._once, method, path, body, **options))

    async def _once(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (200, 201),
        answer_s: float = 0.0,
    ) -> dict[str, Any]:
        """Return the document of an answer whose status is one of `accept`. The answer may take `answer_s` longer than
        that of other requests."""
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S + answer_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method, self._url + path, data=data, params=query, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _lost(self._url, error) from error
        if response.status not in accept:
            raise _error_in(response.status, content)
        try:
            document: dict[str, Any] = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise ApiRefused(f"--url {self._url} does not answer as the control API of headrace: check it") from error
        return document


def _path(run_id: str, *parts: str) -> str:
    return "/".join(("/v1/runs", *(quote(part, safe="") for part in (run_id, *parts))))


def node_status(values: Mapping[str, Any]) -> NodeStatus:
    """Return the node of decoded JSON. Unknown keys are ignored: a newer server may have more."""
    known = {field.name: values[field.name] for field in fields(NodeStatus) if field.name in values}
    return NodeStatus(**{**known, "runs": tuple(values["runs"])})


def node_drained(values: Mapping[str, Any]) -> NodeDrained:
    """Return the drained node of decoded JSON."""
    runs = {run_id: RunLeft(**{**left, "engines": tuple(left["engines"])}) for run_id, left in values["runs"].items()}
    return NodeDrained(node=values["node"], address=values["address"], runs=runs)


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
