"""Clients of retrievers, helper models and reward servers over HTTP.

Invariant: only an answer that follows the contract is returned, and anything else is ServiceDown: an outage never looks
like a search without results or like an empty text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson

from headrace.actors.services.calls import ServiceCalls, ServiceRefused, ServiceUnavailable, Usage
from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.service import Passage

OVERLOADED: Final = frozenset({429, 503})
SHOWN_CHARACTERS: Final = 200
"""Maximum characters of an answer that an error quotes."""


class HttpEndpoint:
    """One URL of a service, which takes and returns JSON objects."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self.url = url
        self._session = session
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def post(self, document: Mapping[str, Any]) -> Any:
        """Return the decoded answer. Raises ServiceUnavailable, ServiceRefused."""
        headers = self._headers | {"Content-Type": "application/json"}
        try:
            # A redirect could have this node ask for its own credentials, and quote them in an error.
            async with self._session.post(
                self.url, data=orjson.dumps(document), headers=headers, allow_redirects=False
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceUnavailable(f"{self.url}: {type(error).__name__}: {error}") from error
        shown = " ".join(body[:SHOWN_CHARACTERS].decode(errors="replace").split())
        if response.status in (408, 429) or response.status >= 500:
            raise ServiceUnavailable(
                f"{self.url} answered {response.status}: {shown}",
                overloaded=response.status in OVERLOADED,
                retry_after_s=_seconds(response.headers.get("Retry-After", "")),
            )
        if response.status != 200:
            raise ServiceRefused(f"{self.url} answered {response.status}: {shown}")
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ServiceUnavailable(f"{self.url}: the answer is not valid JSON: {shown}") from error


def _seconds(text: str) -> float:
    """Return a Retry-After header in seconds; 0 for a date, which services with short waits do not send."""
    return float(text) if text.isdigit() else 0.0


class HttpRetriever:
    """Client of a retriever with Search-R1's contract: `POST /retrieve {queries, topk, return_scores}`."""

    def __init__(self, calls: ServiceCalls, endpoint: HttpEndpoint) -> None:
        self._calls, self._endpoint = calls, endpoint

    async def retrieve(self, queries: Sequence[str], *, top_k: int) -> list[list[Passage]]:
        """Return the best passages for each query, best first; none if nothing matches. Raises ServiceDown."""
        if not queries:
            return []

        async def send() -> list[list[Passage]]:
            answer = await self._endpoint.post({"queries": list(queries), "topk": top_k, "return_scores": True})
            found = parse_passages(answer, len(queries), top_k)
            self._calls.used(Usage())
            return found

        return await self._calls(send)


def parse_passages(answer: Any, queries: int, top_k: int) -> list[list[Passage]]:
    """Parse the answer of a retriever for this number of queries. Raises ServiceUnavailable if it does not follow the
    contract."""
    found: list[list[Passage | None]] = [[None]]
    match answer:
        case {"result": list() as lists} if len(lists) == queries and all(isinstance(row, list) for row in lists):
            found = [[_passage(entry) for entry in row] for row in lists]
    if any(passage is None for row in found for passage in row):
        raise ServiceUnavailable(
            "the answer is not a list of passages for each query ({result: [[{contents}, ...], ...]}): "
            f"{str(answer)[:SHOWN_CHARACTERS]}"
        )
    return [[passage for passage in row if passage is not None][:top_k] for row in found]


def _passage(entry: Any) -> Passage | None:
    """Parse one passage, with or without a score; None if it is not one."""
    match entry:
        case {"document": {"contents": str() as contents}, **rest} if contents:
            score = rest.get("score")
            return Passage(contents=contents, score=float(score) if isinstance(score, int | float) else None)
        case {"contents": str() as contents} if contents:
            return Passage(contents=contents)
    return None


class HttpHelperModel:
    """Client of a model behind OpenAI's Chat Completions API."""

    def __init__(self, calls: ServiceCalls, endpoint: HttpEndpoint, model: str = "") -> None:
        self._calls, self._endpoint, self._model = calls, endpoint, model

    async def complete(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> str:
        """Return the answer to a conversation. Raises ServiceDown, also for an answer without text."""
        request = {
            "messages": [message.to_json() for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        request |= {"model": self._model} if self._model else {}
        request |= {} if seed is None else {"seed": seed}

        async def send() -> str:
            answer = await self._endpoint.post(request)
            # Also an answer without text has its price.
            self._calls.used(parse_usage(answer))
            return parse_text(answer)

        return await self._calls(send)


def parse_text(answer: Any) -> str:
    """Return the text of a chat completion. Raises ServiceUnavailable if it is not one, ServiceRefused if it has no
    text."""
    match answer:
        case {"choices": [{"message": {"content": str() as text}}, *_]} if text.strip():
            return text
        case {"choices": [{"message": dict(), **choice}, *_]}:
            raise ServiceRefused(
                f"the answer has no text (finish_reason {choice.get('finish_reason')}); if the model thinks first, "
                "give it more tokens or turn that off"
            )
    raise ServiceUnavailable(f"the answer is not a chat completion: {str(answer)[:SHOWN_CHARACTERS]}")


class HttpRewardServer:
    """Client of a server that scores rollouts: `POST URL`, with a JSON object in both directions."""

    def __init__(self, calls: ServiceCalls, endpoint: HttpEndpoint) -> None:
        self._calls, self._endpoint = calls, endpoint

    async def score(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a rollout's document, whose values are not checked. Raises ServiceDown."""

        async def send() -> Mapping[str, Any]:
            answer = await self._endpoint.post(document)
            if not isinstance(answer, dict) or "reward" not in answer:
                raise ServiceUnavailable(f"the answer is not an object with reward: {str(answer)[:SHOWN_CHARACTERS]}")
            self._calls.used(Usage())
            return answer

        return await self._calls(send)


def parse_usage(answer: Any) -> Usage:
    """Return the tokens that a chat completion used; 0 where the service does not say."""
    match answer:
        case {"usage": {"prompt_tokens": int() as prompt, "completion_tokens": int() as completion}}:
            return Usage(prompt_tokens=prompt, completion_tokens=completion)
    return Usage()
