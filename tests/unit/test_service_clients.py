"""Clients of services against a server that misbehaves: an outage is ServiceDown and never an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web

from headrace.actors.errors import ConfigError
from headrace.actors.services.calls import FAILURES_TO_OPEN, LONGEST_OPEN_S, OPEN_S, ServiceCalls
from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.clients import ServiceClients, refuse_silent_services
from headrace.actors.services.config import PriceSection, RetrySection, ServiceConfig, ServiceKind
from headrace.actors.services.figures import service_time
from headrace.actors.services.http import HttpEndpoint, HttpRetriever
from headrace.actors.services.service import Passage, ServiceDown
from headrace.sandboxes.host.key_files import make_key, read_key
from support.scripted_service import ScriptedService, completion, cut_off, json, passages, silent, text

FOUND = passages('"A"\none', '"B"\ntwo')
HELLO = [ChatMessage(role="user", content="Hello")]


def config_of(url: str, kind: ServiceKind = ServiceKind.RETRIEVER, *, attempts: int = 2, **more: Any) -> ServiceConfig:
    return ServiceConfig(kind=kind, url=url, retry=RetrySection(attempts=attempts, total_s=20.0), **more)


@asynccontextmanager
async def one_client(service: ScriptedService, **more: Any) -> AsyncIterator[ServiceClients]:
    async with service.served() as url, ServiceClients({"it": config_of(url, **more)}) as clients:
        yield clients


async def retrieved(service: ScriptedService, **more: Any) -> list[list[Passage]]:
    async with one_client(service, **more) as clients:
        return await clients.retriever("it").retrieve(["who"], top_k=2)


@pytest.mark.parametrize("scored", [False, True])
async def test_both_forms_of_passages_are_read(scored: bool) -> None:
    rows = [{"document": {"contents": "a"}, "score": 2}, {"document": {"contents": "b"}, "score": 1.5}]
    service = ScriptedService(json({"result": [rows]} if scored else passages("a", "b")))
    scores = (2.0, 1.5) if scored else (None, None)
    expected = [Passage(contents="a", score=scores[0]), Passage(contents="b", score=scores[1])]
    assert await retrieved(service) == [expected]
    assert service.requests == [{"queries": ["who"], "topk": 2, "return_scores": True}]


async def test_a_redirect_is_not_followed() -> None:
    target = ScriptedService(json(FOUND))
    async with target.served() as url:
        service = ScriptedService(json({}, 307, Location=f"{url}/retrieve"))
        with pytest.raises(ServiceDown, match="answered 307"):
            await retrieved(service)
    assert target.requests == []


async def test_without_queries_no_request_is_sent() -> None:
    service = ScriptedService(json(FOUND))
    async with one_client(service) as clients:
        assert await clients.retriever("it").retrieve([], top_k=2) == []
    assert service.requests == []


@pytest.mark.parametrize(
    "fault",
    [json({}, 502), json({}, 503), json({}, 429, Retry_After="0"), json({}, 408), text("<html>"), cut_off],
    ids=["502", "503", "429", "408", "not-json", "cut-off"],
)
async def test_an_error_that_passes_is_retried(fault: Any) -> None:
    service = ScriptedService(fault, json(FOUND))
    async with one_client(service) as clients:
        [found] = await clients.retriever("it").retrieve(["who"], top_k=2)
        totals = clients.figures()["it"].totals
    assert [passage.contents for passage in found] == ['"A"\none', '"B"\ntwo']
    assert (totals.calls, totals.failures, totals.retries) == (1, 0, 1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (json({}), "not a list of passages for each query"),
        (json([]), "not a list of passages for each query"),
        (json({"result": []}), "not a list of passages for each query"),
        (json({"result": [[{"contents": "a"}], [{"contents": "b"}]]}), "not a list of passages for each query"),
        (json({"result": ["text"]}), "not a list of passages for each query"),
        (json({"result": [["text"]]}), "not a list of passages for each query"),
        (json({"result": [[{"contents": ""}]]}), "not a list of passages for each query"),
        (json({"result": [[{"contents": "a"}, {"text": "b"}]]}), "not a list of passages for each query"),
        (json({"error": "no"}, 400), 'answered 400: {"error": "no"}'),
        (json({}, 404), "answered 404"),
        (text(""), "the answer is not valid JSON"),
    ],
)
async def test_a_malformed_or_empty_answer_is_an_outage_and_no_empty_result(answer: Any, says: str) -> None:
    with pytest.raises(ServiceDown, match=says) as down:
        await retrieved(ScriptedService(answer))
    assert down.value.service == "it"


async def test_a_query_without_a_match_is_an_answer() -> None:
    """A policy can ask for what no retriever knows; that is not an outage, which would cost it no reward."""
    assert await retrieved(ScriptedService(json({"result": [[]]}))) == [[]]


async def test_a_refusal_is_not_retried() -> None:
    service = ScriptedService(json({}, 400))
    with pytest.raises(ServiceDown):
        await retrieved(service, attempts=5)
    assert len(service.requests) == 1


async def test_a_slow_service_is_given_up_in_time_and_gets_fewer_calls_at_once() -> None:
    """F14: the limit on calls follows the service."""
    service = ScriptedService(silent)
    async with one_client(service, attempts=1, timeout_s=0.05, max_concurrency=8) as clients:
        with pytest.raises(ServiceDown, match=r"no answer within 0\.05 s"):
            await clients.retriever("it").retrieve(["who"], top_k=2)
        assert clients.figures()["it"].limit == 4


async def test_the_limit_recovers_after_an_overload() -> None:
    """F14."""
    service = ScriptedService(json({}, 429, Retry_After="0"), json(FOUND))
    async with one_client(service, attempts=1, max_concurrency=2) as clients:
        retriever = clients.retriever("it")
        with pytest.raises(ServiceDown, match="answered 429"):
            await retriever.retrieve(["who"], top_k=1)
        assert clients.figures()["it"].limit == 1
        await retriever.retrieve(["who"], top_k=1)
        assert clients.figures()["it"].limit == 2


async def test_no_more_calls_are_in_progress_than_the_limit_allows() -> None:
    gate = asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        if service.open == 3:
            gate.set()
        await gate.wait()
        return web.json_response(FOUND)

    service = ScriptedService(answer)
    async with one_client(service, max_concurrency=3) as clients, asyncio.TaskGroup() as tasks:
        for _ in range(12):
            tasks.create_task(clients.retriever("it").retrieve(["who"], top_k=1))
        await gate.wait()
        assert clients.figures()["it"].waiting == 9
    assert service.most_open == 3
    totals = clients.figures()["it"].totals
    assert (totals.calls, totals.failures) == (12, 0)
    assert totals.waiting_s > 0


async def test_an_endless_502_is_bounded_opens_the_circuit_and_one_probe_closes_it() -> None:
    """F3: bounded retries, then no request at all until a single probe."""
    now = 0.0
    service = ScriptedService(json({}, 502))
    async with service.served() as url, aiohttp.ClientSession() as session:
        calls = ServiceCalls("it", config_of(url), clock=lambda: now)
        retriever = HttpRetriever(calls, HttpEndpoint(session, f"{url}/retrieve"))

        async def fails(says: str) -> None:
            with pytest.raises(ServiceDown, match=says):
                await retriever.retrieve(["who"], top_k=1)

        for _ in range(FAILURES_TO_OPEN):
            await fails("answered 502")
        assert len(service.requests) == 2 * FAILURES_TO_OPEN, "two attempts for each call"
        await fails(r"none is made for now \(2\.0 s left\): .* answered 502")
        assert len(service.requests) == 2 * FAILURES_TO_OPEN, "the circuit is open"

        now += OPEN_S
        await fails("answered 502")
        assert len(service.requests) == 2 * FAILURES_TO_OPEN + 1, "a probe is one request"
        await fails(r"none is made for now \(4\.0 s left\)")

        service.script = [json(FOUND)]
        now += LONGEST_OPEN_S
        assert await retriever.retrieve(["who"], top_k=1)
        assert await retriever.retrieve(["who"], top_k=1)
        assert len(service.requests) == 2 * FAILURES_TO_OPEN + 3


async def test_calls_beside_a_probe_fail_at_once_and_a_cancelled_probe_makes_room_for_another() -> None:
    """F3."""
    now = 0.0
    service = ScriptedService(json({}, 502))
    async with service.served() as url, aiohttp.ClientSession() as session:
        calls = ServiceCalls("it", config_of(url, attempts=1), clock=lambda: now)
        retriever = HttpRetriever(calls, HttpEndpoint(session, f"{url}/retrieve"))
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(ServiceDown):
                await retriever.retrieve(["who"], top_k=1)
        now += OPEN_S
        arrived = asyncio.Event()

        async def hold(request: web.Request) -> web.StreamResponse:
            arrived.set()
            return await silent(request)

        service.script = [hold]
        probe = asyncio.create_task(retriever.retrieve(["who"], top_k=1))
        await arrived.wait()
        with pytest.raises(ServiceDown, match="none is made for now"):
            await retriever.retrieve(["who"], top_k=1)
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        service.script = [json(FOUND)]
        assert await retriever.retrieve(["who"], top_k=1)


async def test_a_service_that_nobody_serves_is_down() -> None:
    async with ServiceClients({"it": config_of("http://127.0.0.1:9")}) as clients:
        with pytest.raises(ServiceDown, match=r"service it: http://127\.0\.0\.1:9/retrieve: Client"):
            await clients.retriever("it").retrieve(["who"], top_k=1)


async def test_a_retry_after_beyond_the_total_time_is_not_waited_for() -> None:
    service = ScriptedService(json({}, 429, Retry_After="3600"))
    with pytest.raises(ServiceDown, match="answered 429"):
        await retrieved(service, attempts=5)
    assert len(service.requests) == 1


async def completed(service: ScriptedService, **more: Any) -> str:
    async with one_client(service, kind=ServiceKind.MODEL, **more) as clients:
        return await clients.model("it").complete(HELLO, max_tokens=8, temperature=0.5, seed=3)


async def test_a_helper_model_is_asked_with_its_name_key_and_sampling(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    service = ScriptedService(json(completion("Hi.")))
    assert await completed(service, model="judge", key_file=tmp_path / "key") == "Hi."
    assert service.requests == [
        {
            "model": "judge",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "temperature": 0.5,
            "seed": 3,
        }
    ]
    assert service.headers[0]["Authorization"] == f"Bearer {read_key(tmp_path / 'key', 'key')}"


async def test_a_url_that_ends_in_v1_is_accepted() -> None:
    paths = []

    async def answer(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        return web.json_response(completion("Hi."))

    service = ScriptedService(answer)
    async with service.served() as url:
        configs = {"it": config_of(f"{url}/v1/", ServiceKind.MODEL)}
        await refuse_silent_services(configs)
        async with ServiceClients(configs) as clients:
            await clients.model("it").complete(HELLO, max_tokens=8, temperature=0.0)
    assert paths == ["/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (json(completion(None)), r"no text \(finish_reason stop\); if the model thinks first, give it more tokens"),
        (json(completion(" \n")), "no text"),
        (json({"choices": []}), "not a chat completion"),
        (json({"error": {"message": "no such model"}}, 404), "answered 404: .*no such model"),
        (json({"message": "x"}), "not a chat completion"),
        (text("data: [DONE]"), "not valid JSON"),
    ],
)
async def test_an_answer_without_text_is_an_outage(answer: Any, says: str) -> None:
    with pytest.raises(ServiceDown, match=says):
        await completed(ScriptedService(answer))


async def test_tokens_and_costs_are_counted() -> None:
    usage = {"prompt_tokens": 1500, "completion_tokens": 500, "total_tokens": 2000}
    price = PriceSection(prompt_1k=0.2, completion_1k=1.0, request=0.05)
    service = ScriptedService(json(completion("Hi.", usage=usage)))
    async with one_client(service, kind=ServiceKind.MODEL, price=price) as clients:
        for _ in range(2):
            await clients.model("it").complete(HELLO, max_tokens=8, temperature=0.0)
        totals = clients.figures()["it"].totals
    assert (totals.calls, totals.prompt_tokens, totals.completion_tokens) == (2, 3000, 1000)
    assert totals.cost == pytest.approx(2 * (0.3 + 0.5 + 0.05))
    assert "cost 1.7" in totals.line()


async def test_a_deadline_that_passes_during_a_call_names_the_service() -> None:
    """F14: a rollout whose time ran out in a service can be told from one whose agent used it up."""
    async with one_client(ScriptedService(silent)) as clients:
        with service_time() as measured:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await clients.retriever("it").retrieve(["who"], top_k=1)
            assert measured.interrupted == "it"
            assert measured.seconds["it"] > 0
        figures = clients.figures()["it"]
    assert (figures.in_flight, figures.totals.calls) == (0, 0)


class Library:
    """A retriever of another package."""

    def __init__(self, *, shelf: str) -> None:
        self.shelf, self.opened = shelf, False

    async def __aenter__(self) -> Self:
        self.opened = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.opened = False

    async def retrieve(self, queries: Sequence[str], *, top_k: int) -> list[list[Passage]]:
        if not self.opened or "closed" in queries:
            raise RuntimeError("the library is closed")
        return [[Passage(contents=f"{self.shelf}: {query}")] * top_k if query else [] for query in queries]


async def test_a_service_of_another_package_has_the_same_guarantees() -> None:
    config = ServiceConfig(kind=f"{__name__}:Library", settings={"shelf": "A"}, retry=RetrySection(attempts=2))
    async with ServiceClients({"it": config}) as clients:
        retriever = clients.retriever("it")
        assert await retriever.retrieve(["x"], top_k=1) == [[Passage(contents="A: x")]]
        with pytest.raises(ServiceDown, match="RuntimeError: the library is closed"):
            await retriever.retrieve(["closed"], top_k=1)
        assert await retriever.retrieve([""], top_k=1) == [[]]
        totals = clients.figures()["it"].totals
        assert (totals.calls, totals.failures, totals.retries) == (3, 1, 1)
        with pytest.raises(ConfigError, match="is not a model"):
            clients.model("it")


@pytest.mark.parametrize(
    ("kind", "answer", "says"),
    [
        (ServiceKind.RETRIEVER, json({}, 502), "service it does not answer at http.*: .* answered 502.*; start it or "),
        (ServiceKind.RETRIEVER, json({"result": []}), "correct services.it.url"),
        (ServiceKind.MODEL, json({}, 500), "answered 500; start it or correct services.it.url"),
        (ServiceKind.MODEL, json({}, 401), "answered 401: set services.it.key_file"),
    ],
)
async def test_a_service_that_does_not_answer_at_start_is_refused(kind: ServiceKind, answer: Any, says: str) -> None:
    async with ScriptedService(answer).served() as url:
        with pytest.raises(ConfigError, match=says):
            await refuse_silent_services({"it": config_of(url, kind)})


async def test_services_that_answer_at_start_are_accepted() -> None:
    async with ScriptedService(json(FOUND)).served() as url, ScriptedService(json({}, 404)).served() as other:
        await refuse_silent_services({"wiki": config_of(url), "user": config_of(other, ServiceKind.MODEL)})


async def test_a_port_without_a_server_is_refused_at_start() -> None:
    for kind in (ServiceKind.RETRIEVER, ServiceKind.MODEL):
        with pytest.raises(ConfigError, match=r"it does not answer at http://127\.0\.0\.1:9: .*; start it or"):
            await refuse_silent_services({"it": config_of("http://127.0.0.1:9", kind)})
