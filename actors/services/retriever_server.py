"""The retriever server: BM25 over one corpus, with Search-R1's contract over HTTP.

Invariants:
- The server answers only once the whole corpus has been read, checked and indexed.
- Searches run in threads: requests and signals are never kept waiting by one.
- It ends on SIGTERM or SIGINT, and by itself after `idle_s` without a request.
- Once it answers, it outlives whoever started it. While it indexes, it dies with its parent if `parent_pid` is set.
- It listens on other addresses than loopback only with a key.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson
import psutil
from aiohttp import web

from headrace.actors.errors import ConfigError
from headrace.actors.services.corpus import CorpusRefused, PassageIndex
from headrace.buffer.primitives.durable_files import replace_file
from headrace.policies.processes.engine_keys import is_loopback
from headrace.policies.processes.parent_death import die_with_parent, outlive_parent
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.key_files import read_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aiohttp.typedefs import Handler

MAX_TOP_K: Final = 100
MAX_QUERIES: Final = 1024
CLOSE_S: Final = 0.5
"""Time for the requests in progress to end when the server stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverOptions:
    """Command-line options."""

    corpus: Path
    host: str = "127.0.0.1"
    port: int = 0
    address_file: Path | None = None
    idle_s: float = 1800.0
    key_file: Path | None = None
    parent_pid: int | None = None


def serve_retriever(options: RetrieverOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal, or until no request has come for `idle_s`. `announce` is called with the base URL. Raises
    ConfigError."""
    if options.key_file is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host}: other hosts could use the retriever; name a file with a key (--key-file FILE), or "
            "bind 127.0.0.1"
        )
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    try:
        key = None if options.key_file is None else read_key(options.key_file, "--key-file")
        index = PassageIndex(options.corpus)
    except SecretRefused as error:
        raise ConfigError(str(error)) from error
    except CorpusRefused as error:
        raise ConfigError(f"--corpus {error}") from error
    asyncio.run(RetrieverServer(index, key).serve(options, announce))


class RequestInvalid(Exception):
    """The request does not follow the contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Body of `POST /retrieve`."""

    queries: tuple[str, ...]
    top_k: int
    with_scores: bool


def parse_request(body: bytes) -> SearchRequest:
    """Parse the body of a request. Raises RequestInvalid."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestInvalid(f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestInvalid("the body is not an object; send {queries, topk, return_scores}")
    queries, top_k = document.get("queries"), document.get("topk", 3)
    with_scores = document.get("return_scores", False)
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise RequestInvalid("queries: must be a list of one or more strings")
    if len(queries) > MAX_QUERIES:
        raise RequestInvalid(f"queries: at most {MAX_QUERIES} in one request")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
        raise RequestInvalid(f"topk: must be a whole number from 1 to {MAX_TOP_K}")
    if not isinstance(with_scores, bool):
        raise RequestInvalid("return_scores: must be true or false")
    return SearchRequest(queries=tuple(queries), top_k=top_k, with_scores=with_scores)


class RetrieverServer:
    """The server over an index."""

    def __init__(self, index: PassageIndex, key: str | None = None) -> None:
        self._index, self._key = index, key
        self._open_requests = 0
        self._idle_s = 0.0
        self._ended = asyncio.Event()
        self._idle: asyncio.Timeout | None = None

    async def serve(self, options: RetrieverOptions, announce: Callable[[str], None]) -> None:
        """Serve as `serve_retriever` does."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        app = web.Application(middlewares=[self._counted])
        app.add_routes([web.post("/retrieve", self._retrieve), web.get("/health", self._health)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        # Not the loop's own threads: `asyncio.run` would wait for them, and a signal ends the server at once.
        self._threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="search")
        await runner.setup()
        try:
            site = web.TCPSite(runner, options.host, options.port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(
                    f"--host {options.host} --port {options.port}: {error.strerror}; choose another port or 0"
                ) from error
            host, port = runner.addresses[0][:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            if options.parent_pid is not None:
                outlive_parent()
            if options.address_file is not None:
                replace_file(options.address_file, orjson.dumps(self._identity() | {"url": url}), mode=0o600)
            announce(url)
            with suppress(TimeoutError):
                async with asyncio.timeout(options.idle_s) as self._idle:
                    self._idle_s = options.idle_s
                    await self._ended.wait()
        finally:
            self._idle = None
            await runner.cleanup()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _identity(self) -> dict[str, object]:
        """Return what identifies this process and its corpus. A process id alone may be used again."""
        process = psutil.Process()
        return {"pid": process.pid, "started_s": process.create_time(), "corpus_sha256": self._index.digest}

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and measure the idle time from the end of the last request."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            return web.json_response({"error": "send the key as Authorization: Bearer KEY"}, status=401)
        self._open_requests += 1
        self._set_idle_end(None)
        try:
            return await handler(request)
        finally:
            self._open_requests -= 1
            if not self._open_requests:
                self._set_idle_end(asyncio.get_running_loop().time() + self._idle_s)

    def _set_idle_end(self, when: float | None) -> None:
        # Once it has expired it cannot be moved; the server is ending then.
        if self._idle is not None and not self._idle.expired():
            with suppress(RuntimeError):
                self._idle.reschedule(when)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "passages": len(self._index.passages)} | self._identity())

    async def _retrieve(self, request: web.Request) -> web.Response:
        try:
            search = parse_request(await request.read())
        except RequestInvalid as error:
            return web.json_response({"error": str(error)}, status=400)
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._index.search, search.queries, search.top_k
        )
        rows = [
            [
                {"document": {"contents": passage.contents}, "score": passage.score}
                if search.with_scores
                else {"contents": passage.contents}
                for passage in passages
            ]
            for passages in found
        ]
        return web.Response(body=orjson.dumps({"result": rows}), content_type="application/json")
