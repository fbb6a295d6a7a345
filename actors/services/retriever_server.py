"""The retriever server: BM25 over one corpus, with Search-R1's contract over HTTP.

Invariants:
- The server answers only once the whole corpus has been read, checked and indexed.
- Searches run in threads: requests and signals are never kept waiting by one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web

from headrace.actors.errors import ConfigError
from headrace.actors.services.corpus import CorpusRefused, PassageIndex
from headrace.actors.services.local_server import ListenOptions, LocalServer

MAX_TOP_K: Final = 100
MAX_QUERIES: Final = 1024


def serve_retriever(corpus: Path, options: ListenOptions, announce: Callable[[str], None]) -> None:
    """Serve as `LocalServer.serve` does. Raises ConfigError."""
    key = options.prepare()
    try:
        index = PassageIndex(corpus)
    except CorpusRefused as error:
        raise ConfigError(f"--corpus {error}") from error
    asyncio.run(RetrieverServer(index, key).serve(options, announce))


class SearchInvalid(Exception):
    """The request does not follow the contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Body of `POST /retrieve`."""

    queries: tuple[str, ...]
    top_k: int
    with_scores: bool


def parse_request(body: bytes) -> SearchRequest:
    """Parse the body of a request. Raises SearchInvalid."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SearchInvalid(f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise SearchInvalid("the body is not an object; send {queries, topk, return_scores}")
    queries, top_k = document.get("queries"), document.get("topk", 3)
    with_scores = document.get("return_scores", False)
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise SearchInvalid("queries: must be a list of one or more strings")
    if len(queries) > MAX_QUERIES:
        raise SearchInvalid(f"queries: at most {MAX_QUERIES} in one request")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
        raise SearchInvalid(f"topk: must be a whole number from 1 to {MAX_TOP_K}")
    if not isinstance(with_scores, bool):
        raise SearchInvalid("return_scores: must be true or false")
    return SearchRequest(queries=tuple(queries), top_k=top_k, with_scores=with_scores)


class RetrieverServer(LocalServer):
    """The server over an index."""

    def __init__(self, index: PassageIndex, key: str | None = None) -> None:
        super().__init__(digest=index.digest, key=key)
        self._index = index

    async def serve(self, options: ListenOptions, announce: Callable[[str], None]) -> None:
        """See `LocalServer`."""
        # Not the loop's own threads: `asyncio.run` would wait for them, and a signal ends the server at once.
        self._threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="search")
        try:
            await super().serve(options, announce)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _routes(self) -> Iterable[web.RouteDef]:
        return (web.post("/retrieve", self._retrieve),)

    def _facts(self) -> dict[str, object]:
        return {"passages": len(self._index.passages)}

    async def _retrieve(self, request: web.Request) -> web.Response:
        try:
            search = parse_request(await request.read())
        except SearchInvalid as error:
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
