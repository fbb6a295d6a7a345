"""The HTTP contract of an engine, against real processes: keys, types, statuses, spans, log-probabilities.

Every test runs against our embedded engine and, where it is installed, against SGLang itself. Where SGLang is more
lenient or more fragile a test says so, and what holds for both is the contract: callers rely on that alone.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, FinishReason, GenerateRequest, Grammar, GrammarKind, PauseMode, RequestId
from headrace.policies.errors import (
    EngineRefused,
    EngineStartFailed,
    EngineTimeout,
    EngineUnavailable,
    GrammarMissing,
    RequestInvalid,
)
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig, ServerProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.replies import error_text
from headrace.policies.sglang.versions import SGLangApi, release
from headrace.serve.tracing.tracing import traceparent_of
from support import engine_kinds as kinds
from support.cutting_proxy import cutting_proxy
from support.recorded_spans import recorded_spans

# SGLang alone imports for half a minute.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PROMPT = [10, 20, 30, 40]
VOCABULARY = 258
MAX_RUNNING = 4
META_TYPES = {
    "id": str,
    "finish_reason": dict,
    "prompt_tokens": int,
    "weight_version": str,
    "weight_versions": list,
    "num_retractions": int,
    "completion_tokens": int,
    "reasoning_tokens": int,
    "cached_tokens": int,
    "dp_rank": type(None),
    "e2e_latency": float,
    "response_sent_to_client_ts": float,
    "queue_time": float,
    "forward_entry_time": float,
    "prefill_finished_time": float,
    "input_token_logprobs": list,
    "output_token_logprobs": list,
    "output_token_logprobs_length": int,
}
TIMES = {"queue_time", "forward_entry_time", "prefill_finished_time"}
MISSING_WHEN_QUEUED = {"prompt_tokens", "cached_tokens", "num_retractions", "reasoning_tokens", "dp_rank", *TIMES}


class Wire:
    """Raw calls to one engine. `genuine`: it is SGLang itself."""

    def __init__(self, session: aiohttp.ClientSession, process: ServerProcess, dialect: SGLangApi) -> None:
        self.session, self.url, self.process, self.dialect = session, process.url, process, dialect
        self.genuine = not isinstance(process, EngineProcess)

    async def post(self, path: str, body: object = None, *, data: bytes | None = None) -> tuple[int, Any]:
        payload = (b"" if body is None else json.dumps(body).encode()) if data is None else data
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=payload, headers=headers) as response:
            return response.status, parse(await response.read())

    async def refused(self, path: str, body: object = None, *, data: bytes | None = None) -> str:
        """What a call is refused with: the text, in whichever form this engine wraps it."""
        status, reply = await self.post(path, body, data=data)
        assert status == 400, reply
        return error_text(json.dumps(reply).encode()) if isinstance(reply, dict) else str(reply)

    def meta_types(self) -> dict[str, type]:
        """Of every reply's meta_info."""
        without = set() if self.dialect.version_spans else {"weight_versions"}
        return {key: kind for key, kind in META_TYPES.items() if key not in without}

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, parse(await response.read())

    async def generate(self, ids: list[int] = PROMPT, **sampling: object) -> dict[str, Any]:
        params = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
        status, reply = await self.post(
            "/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        )
        assert status == 200, reply
        return reply

    def long(self, rid: str, tokens: int = 900) -> asyncio.Task[tuple[int, Any]]:
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "rid": rid}
        return asyncio.get_running_loop().create_task(self.post("/generate", body))

    async def until(self, *, running: int | None = None, waiting: int | None = None, tokens: int = 0) -> None:
        """Ask until the engine says so: each answer is one round trip. `tokens` are those it holds at least."""
        async with asyncio.timeout(30):
            while True:
                load = (await self.get("/v1/loads"))[1]["loads"][0]
                counted = running in (None, load["num_running_reqs"]) and waiting in (None, load["num_waiting_reqs"])
                if counted and load["num_used_tokens"] >= tokens:
                    return


def parse(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        return payload.decode()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["cpu", pytest.param("sglang", marks=pytest.mark.sglang)]
)
async def wire(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Wire]:
    folder = tmp_path_factory.mktemp("engine")
    process = kinds.engine_process(request.param, tiny_model_dir, folder, max_running=MAX_RUNNING)
    async with process, aiohttp.ClientSession() as session:
        yield Wire(session, process, kinds.kind_dialect(request.param))


@pytest.fixture
def embedded(wire: Wire) -> Wire:
    """For what only our engine promises."""
    if wire.genuine:
        pytest.skip("SGLang does not promise this")
    return wire


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def clean_between_tests(wire: Wire) -> AsyncIterator[None]:
    yield
    await wire.post("/continue_generation", {})
    await wire.post("/abort_request", {"abort_all": True})
    await wire.until(running=0, waiting=0)
    assert wire.process.alive


def client(wire: Wire, **changes: float) -> SGLangEngine:
    config = SGLangConfig.model_validate({"vocab_size": VOCABULARY, **changes})
    return SGLangEngine(EngineId("e"), wire.url, wire.session, config)


async def test_a_reply_has_the_keys_and_types_of_the_contract(wire: Wire) -> None:
    await wire.post("/flush_cache")
    reply = await wire.generate()
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    types = wire.meta_types()
    # With --enable-metrics SGLang reports more times than we read.
    assert set(meta) >= {*types, "cached_tokens_details"}
    assert wire.genuine or set(meta) == {*types, "cached_tokens_details"}
    assert 0 <= meta["queue_time"] <= meta["e2e_latency"]
    assert 0 <= meta["prefill_finished_time"] - meta["forward_entry_time"] <= meta["e2e_latency"]
    for key, kind in types.items():
        assert type(meta[key]) is kind, key
    # By medium, once something was cached.
    assert isinstance(meta["cached_tokens_details"], dict | None)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["weight_version"] == "1.0"
    if wire.dialect.version_spans:
        assert meta["weight_versions"] == [{"version": "1.0", "start": 0, "end": 8}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[item, None] for item in reply["output_ids"]]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 8, 0)
    status, bare = await wire.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert status == 200
    assert "output_token_logprobs" not in bare["meta_info"]


async def test_a_generation_names_the_span_that_asks_for_it(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch) as recorded:
        async with cutting_proxy(wire.url) as proxy:
            engine = SGLangEngine(EngineId("e"), proxy.url, wire.session, SGLangConfig(vocab_size=VOCABULARY))
            ask = GenerateRequest(request_id=RequestId("named"), input_ids=array("i", PROMPT), max_new_tokens=2)
            with recorded.tracer.start_as_current_span("asks") as span:
                assert len((await engine.generate(ask)).output_ids) == 2
            assert proxy.requests.count(b"traceparent: ") == 1
            assert f"traceparent: {traceparent_of(span)}\r\n".encode() in proxy.requests
            await engine.generate(replace(ask, request_id=RequestId("alone")))
            assert proxy.requests.count(b"traceparent: ") == 1, "without a span there is no header"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 3, "temperature": 1.5}, {"temperature": 0}])
async def test_logprobs_match_the_temperature_scaled_softmax(
    wire: Wire, tiny_model_dir: Path, sampling: dict[str, float]
) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    replies = await asyncio.gather(
        *(wire.generate([7 * index + 1, *PROMPT[:index]], max_new_tokens=40, **sampling) for index in range(5))
    )
    for index, reply in enumerate(replies):
        prompt, output = [7 * index + 1, *PROMPT[:index]], reply["output_ids"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        scaled = (logits / (sampling.get("temperature", 1.0) or 1.0)).log_softmax(-1)
        expected = scaled[torch.arange(len(output)), torch.tensor(output)]
        got = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        assert (got - expected).abs().max() <= 1e-3
        if sampling.get("temperature") == 0:
            assert output == logits.argmax(-1).tolist()
        if "top_k" in sampling:
            assert all(token in logits[row].topk(3).indices for row, token in enumerate(output))


async def test_samples_follow_the_distribution(wire: Wire, tiny_model_dir: Path) -> None:
    import torch

    from headrace.policies.models.qwen import Qwen, read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    config = QwenConfig.read(tiny_model_dir / "config.json")
    model = Qwen(config, read_weights(config, tiny_model_dir), capacity=16)
    expected = model.logits([PROMPT])[0, -1].softmax(-1)
    body = {"input_ids": [PROMPT] * 600, "sampling_params": {"max_new_tokens": 1}}
    _, replies = await wire.post("/generate", body)
    counts = torch.bincount(torch.tensor([reply["output_ids"][0] for reply in replies]), minlength=VOCABULARY)
    distance = (counts / 600 - expected).abs().sum() / 2
    # The expected total variation of 600 honest draws is at most sqrt(K / (2 pi n)) for K likely tokens.
    likely = int((expected > 1e-3).sum())
    assert distance < 2 * (likely / (2 * 3.14 * 600)) ** 0.5 + 0.05


async def test_batches_and_requests_for_several_samples_return_lists(wire: Wire) -> None:
    params = {"max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": [[1], [2, 3]], "rid": "bat", "sampling_params": params}
    status, replies = await wire.post("/generate", body)
    assert status == 200
    assert [reply["meta_info"]["id"] for reply in replies] == ["bat_0", "bat_1"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [1, 2]
    status, replies = await wire.post("/generate", {"input_ids": [1], "sampling_params": {**params, "n": 3}})
    assert status == 200
    assert len(replies) == 3


async def test_a_stop_id_is_kept_in_the_ids_but_not_in_the_text(wire: Wire) -> None:
    greedy = await wire.generate(max_new_tokens=6, temperature=0)
    ids = greedy["output_ids"]
    stop = ids[3]
    reply = await wire.generate(max_new_tokens=6, temperature=0, ignore_eos=False, stop_token_ids=[stop])
    cut = ids.index(stop) + 1
    assert reply["output_ids"] == ids[:cut]
    assert len(reply["meta_info"]["output_token_logprobs"]) == cut
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = await wire.generate(
        max_new_tokens=6, temperature=0, ignore_eos=False, stop_token_ids=[stop], no_stop_trim=True
    )
    assert kept["output_ids"] == ids[:cut]
    assert len(kept["text"]) > len(reply["text"])
    assert kept["text"].startswith(reply["text"])


async def test_a_stop_string_is_kept_in_the_ids_but_not_in_the_text(wire: Wire) -> None:
    from itertools import pairwise

    # A seed alone does not make SGLang repeat itself, and what is greedy may say the same letter for ever.
    params = {"max_new_tokens": 60, "temperature": 0}
    for first in range(VOCABULARY):
        free = await wire.generate([first], **params)
        text = free["text"]
        pairs = (one + other for one, other in pairwise(text) if one != other and f"{one}{other}".isascii())
        if stop := next(pairs, ""):
            break
    reply = await wire.generate([first], **params, stop=[stop])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["text"] == text[: text.find(stop)]
    assert reply["output_ids"] == free["output_ids"][: len(reply["output_ids"])]
    kept = await wire.generate([first], **params, stop=[stop], no_stop_trim=True)
    assert kept["output_ids"] == reply["output_ids"]
    assert kept["text"].endswith(stop)


async def test_an_engine_without_a_grammar_says_so(wire: Wire) -> None:
    if not wire.genuine:
        pytest.skip("the embedded engine has a grammar here")
    ask = GenerateRequest(request_id=RequestId("form"), input_ids=PROMPT, max_new_tokens=8)
    for kind in GrammarKind:
        with pytest.raises(GrammarMissing):
            await client(wire).generate(replace(ask, grammar=Grammar(kind=kind, text="{}")))


async def test_a_seeded_request_gives_the_same_tokens_in_a_batch(embedded: Wire) -> None:
    alone = await embedded.generate(max_new_tokens=30, sampling_seed=11)
    together = await asyncio.gather(
        *(embedded.generate(max_new_tokens=30, sampling_seed=seed) for seed in (11, 12, 11)), embedded.generate()
    )
    assert together[0]["output_ids"] == together[2]["output_ids"] == alone["output_ids"]
    assert together[1]["output_ids"] != alone["output_ids"]


async def test_running_and_queued_requests_can_be_aborted(wire: Wire) -> None:
    tasks = [wire.long(f"run{index}") for index in range(MAX_RUNNING)]
    await wire.until(running=MAX_RUNNING)
    queued = wire.long("queued")
    await wire.until(waiting=1)
    assert await wire.post("/abort_request", {"rid": "queued"}) == (200, "")
    status, reply = await queued
    assert status == 200
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert reply["output_ids"] == []
    assert set(reply["meta_info"]) == set(wire.meta_types()) - MISSING_WHEN_QUEUED
    assert await wire.post("/abort_request", {"rid": "run0"}) == (200, "")
    status, reply = await tasks[0]
    assert status == 200
    assert reply["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) > 0
    assert await wire.post("/abort_request", {"rid": "nobody"}) == (200, "")
    assert await wire.post("/abort_request", {"abort_all": True}) == (200, "")
    for task in tasks[1:]:
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_pausing_with_abort_aborts_running_requests(wire: Wire) -> None:
    task = wire.long("a")
    await wire.until(running=1)
    status, reply = await wire.post("/pause_generation", {})
    assert (status, reply["status"]) == (200, "ok")
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await wire.get("/ready"))[0] == (503 if wire.dialect.ready_route else 404)
    assert (await wire.get("/health"))[0] == 200
    assert (await wire.post("/continue_generation", {}))[0] == 200
    assert (await wire.post("/continue_generation", {}))[0] == 200
    assert (await wire.get("/ready"))[0] == (200 if wire.dialect.ready_route else 404)


async def test_a_request_paused_by_retraction_continues_with_the_same_tokens(wire: Wire) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True, "temperature": 0}
    free = await wire.generate(**params)
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "rid": "x"}
    task = asyncio.get_running_loop().create_task(wire.post("/generate", body))
    await wire.until(running=1)
    assert (await wire.post("/pause_generation", {"mode": "retract"}))[0] == 200
    arrived = wire.long("arrived", tokens=3)
    if not wire.genuine:
        # SGLang tells its loads of before the pause all through it.
        await wire.until(running=0, waiting=2)
    # The abort of a request that arrived during the pause is lost.
    assert (await wire.post("/abort_request", {"rid": "arrived"}))[0] == 200
    assert (await wire.post("/continue_generation", {}))[0] == 200
    status, reply = await task
    assert status == 200
    assert reply["meta_info"]["num_retractions"] == 1
    assert reply["output_ids"] == free["output_ids"]
    assert (await arrived)[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_a_retracted_request_can_be_aborted_while_paused(wire: Wire) -> None:
    task = wire.long("x")
    # SGLang hands tokens out in pieces, and of what was retracted only those that it had handed out.
    await wire.until(running=1, tokens=200)
    await wire.post("/pause_generation", {"mode": "retract"})
    await wire.post("/abort_request", {"rid": "x"})
    status, reply = await task
    assert status == 200
    assert reply["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) > 0


async def test_a_body_that_cannot_be_decoded_is_refused(embedded: Wire) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with embedded.session.post(f"{embedded.url}/generate", data=b"no gzip at all", headers=headers) as response:
        assert response.status == 400
        assert "decoded" in await response.text()


async def test_a_request_ends_when_its_client_disconnects(embedded: Wire) -> None:
    """SGLang notices after seconds only: our client aborts what it leaves."""
    task = embedded.long("leaving", tokens=1000)
    await embedded.until(running=1)
    task.cancel()
    await embedded.until(running=0)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {"input_ids": [], "sampling_params": {}}, "empty"),
        ("/generate", {"input_ids": [1] * 1024}, "longer than the model's context length"),
        ("/generate", {"input_ids": [1] * 1000, "sampling_params": {"max_new_tokens": 25}}, "total of 1025"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1.0}}, "temperature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"foo": 1}}, "foo"),
        ("/generate", [1, 2], ""),
        ("/pause_generation", {"mode": "softly"}, "softly"),
        ("/pause_generation", {"mode": ["abort"]}, "abort"),
        ("/abort_request", {"rid": 3}, "rid"),
        ("/update_weights_from_distributed", {"names": 3}, "names"),
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}, "master_port"),
        ("/destroy_weights_update_group", {"group_name": "unknown"}, ""),
        ("/weights_checker", {"action": "burn"}, "burn"),
    ],
)
async def test_bad_requests_return_400_with_the_reason(wire: Wire, path: str, body: object, named: str) -> None:
    if named == "foo" and release(wire.dialect.version) < (0, 5, 22):
        # An error of SGLang's own, after which it serves on.
        assert (await wire.post(path, body))[0] == 500
        return
    assert named in await wire.refused(path, body)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/end_weight_update", {}, "session is open"),
        ("/begin_weight_update", {"selector": "some"}, "selector"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}, ""),
    ],
)
async def test_weights_are_accepted_only_within_a_session(wire: Wire, path: str, body: object, named: str) -> None:
    if not wire.dialect.update_session:
        pytest.skip(f"SGLang {wire.dialect.version} has no sessions")
    assert named in await wire.refused(path, body)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {"input_ids": [1, 99999], "sampling_params": {}}, "99999"),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2**40, "backend": "gloo"},
            "world_size",
        ),
    ],
)
async def test_requests_that_would_kill_sglang_are_refused_by_the_embedded_engine(
    embedded: Wire, path: str, body: object, named: str
) -> None:
    """So it is never sent there: the client checks ids, and only the sender forms groups."""
    assert named in await embedded.refused(path, body)
    huge = b'{"input_ids": [1' + b"0" * 5000 + b"]}"
    assert await embedded.refused("/generate", data=huge)


async def test_invalid_bodies_do_not_stop_the_server(wire: Wire) -> None:
    for data in (b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'"a"'):
        assert await wire.refused("/generate", data=data)
    assert (await wire.get("/nowhere"))[0] == 404
    assert (await wire.get("/generate"))[0] == 405
    assert len((await wire.generate())["output_ids"]) == 8


async def test_a_duplicate_request_id_is_refused_and_the_first_continues(wire: Wire) -> None:
    task = wire.long("twice")
    await wire.until(running=1)
    assert "twice" in await wire.refused("/generate", {"input_ids": PROMPT, "rid": "twice"})
    assert (await task)[1]["meta_info"]["completion_tokens"] == 900


async def test_beginning_a_weight_session_waits_for_running_requests_and_holds_new_ones(wire: Wire) -> None:
    if not wire.dialect.update_session:
        pytest.skip(f"SGLang {wire.dialect.version} has no sessions")
    first = wire.long("first")
    await wire.until(running=1)
    assert (await wire.post("/begin_weight_update", {}))[0] == 200
    assert first.done() or (await wire.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0
    assert (await first)[1]["meta_info"]["completion_tokens"] == 900
    second = wire.long("second", tokens=3)
    # SGLang does not count what waits for a session's end.
    await wire.until(waiting=0 if wire.genuine else 1)
    status, reply = await wire.post("/begin_weight_update", {})
    assert status == 400
    assert reply["success"] is False
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[96]], "group_name": "none"}
    assert "Failed to receive weights" in await wire.refused("/update_weights_from_distributed", body)
    assert (await wire.post("/end_weight_update", {}))[0] == 200
    assert (await second)[1]["meta_info"]["completion_tokens"] == 3


async def test_a_group_without_rank_0_times_out_while_generation_continues(embedded: Wire) -> None:
    """SGLang stands still until rank 0 is there: the sender that never comes costs it a restart."""
    body = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "alone",
        "backend": "gloo",
    }
    joining = asyncio.get_running_loop().create_task(embedded.post("/init_weights_update_group", body))
    assert len((await embedded.generate(max_new_tokens=50))["output_ids"]) == 50
    assert not joining.done()
    status, reply = await joining
    assert status == 400
    assert reply["success"] is False


async def test_a_flush_is_refused_while_requests_are_running(wire: Wire) -> None:
    assert (await wire.get("/flush_cache"))[0] == 200
    task = wire.long("x")
    await wire.until(running=1)
    status, text = await wire.post("/flush_cache")
    assert status == 400
    assert "cache" in text.lower()
    await wire.post("/pause_generation", {"mode": "retract"})
    # What was retracted holds no cache; without sessions SGLang refuses all the same.
    assert (await wire.post("/flush_cache"))[0] == (200 if wire.dialect.update_session else 400)
    await wire.post("/abort_request", {"abort_all": True})
    await task


async def test_info_routes_describe_model_server_and_weights(wire: Wire, tiny_model_dir: Path) -> None:
    status, model = await wire.get("/model_info")
    assert status == 200
    assert (model["model_path"], model["weight_version"]) == (str(tiny_model_dir), "1.0")
    assert (await wire.get("/get_model_info")) == (status, model)
    status, server = await wire.get("/server_info")
    assert status == 200
    assert {"version", "status", "max_req_input_len", "max_total_num_tokens"} <= set(server)
    assert (await wire.get("/health_generate"))[0] == 200
    status, sums = await wire.post("/weights_checker", {"action": "checksum"})
    if release(wire.dialect.version) < (0, 5, 22):
        # Before, SGLang tells none without CUDA.
        assert status == 400
        return
    assert status == 200
    assert sums["success"] is True
    # SGLang's are over tensors that it fused, and shorter: they compare among engines of one kind.
    assert all(len(value) == (16 if wire.genuine else 32) for value in sums["ranks"][0]["checksums"].values())


async def test_the_client_parses_a_completion(wire: Wire) -> None:
    engine = client(wire)
    done = await engine.generate(
        GenerateRequest(request_id=RequestId("c"), input_ids=tuple(PROMPT), max_new_tokens=5, temperature=0.8)
    )
    assert len(done.output_ids) == len(done.logprobs) <= 5
    assert done.spans[-1].end == len(done.output_ids)
    assert done.spans[-1].version == PolicyVersion(1, 0)
    info = await engine.info()
    assert (info.version, info.running, info.paused, info.max_context_tokens) == (PolicyVersion(1, 0), 0, False, 1024)
    await engine.pause(PauseMode.RETRACT)
    assert (await engine.info()).paused
    await engine.resume()


async def test_the_client_raises_typed_errors(wire: Wire) -> None:
    engine = client(wire, generate_timeout_s=0.3)
    bad = GenerateRequest(request_id=RequestId("b"), input_ids=(VOCABULARY,), max_new_tokens=5)
    with pytest.raises(RequestInvalid, match="vocab_size"):
        await engine.generate(bad)
    far = GenerateRequest(request_id=RequestId("f"), input_ids=(1, 2**31), max_new_tokens=5)
    with pytest.raises(RequestInvalid, match="vocab_size"):
        await engine.generate(far)
    for unsendable in ({"stop": ("\ud800",)}, {"stop_token_ids": (2**64,)}):
        request = GenerateRequest(request_id=RequestId("u"), input_ids=(1,), max_new_tokens=5, **unsendable)
        with pytest.raises(RequestInvalid, match="cannot be sent"):
            await engine.generate(request)
    long = GenerateRequest(request_id=RequestId("l"), input_ids=(1,), max_new_tokens=5000)
    with pytest.raises(EngineRefused, match="context length") as refused:
        await client(wire).generate(long)
    assert refused.value.status == 400
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(EngineTimeout, match=r"0\.3 s"):
        await engine.generate(GenerateRequest(request_id=RequestId("t"), input_ids=(1,), max_new_tokens=5))
    await engine.resume()
    nobody = SGLangEngine(EngineId("n"), "http://127.0.0.1:1", wire.session, SGLangConfig(vocab_size=VOCABULARY))
    with pytest.raises(EngineUnavailable):
        await nobody.info()


async def greedy(wire: Wire) -> list[float]:
    """The log-probabilities of one answer: they show which weights run."""
    meta = (await wire.generate(temperature=0))["meta_info"]
    return [entry[0] for entry in meta["output_token_logprobs"]]


@asynccontextmanager
async def restored(engine: SGLangEngine, model: Path) -> AsyncIterator[None]:
    """Whatever happens inside, the weights of the other tests come back."""
    try:
        yield
    finally:
        await engine.update_from_disk(model, version=PolicyVersion(1, 0))
        await engine.flush()


async def test_the_client_loads_weights_from_a_directory(
    wire: Wire, tiny_model_dir: Path, tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    engine, before = client(wire), await greedy(wire)
    async with restored(engine, tiny_model_dir):
        await engine.update_from_disk(write_model(tmp_path / "other", seed=1), version=PolicyVersion(1, 5))
        await engine.flush()
        assert (await engine.info()).version == PolicyVersion(1, 5)
        after = await greedy(wire)
        assert after != pytest.approx(before, abs=1e-3)
        with pytest.raises(EngineRefused) as refused:
            await engine.update_from_disk(tmp_path / "nothing", version=PolicyVersion(1, 6))
        assert refused.value.status == 400
        assert (await engine.info()).version == PolicyVersion(1, 5)
        assert await greedy(wire) == pytest.approx(after, abs=1e-3)
    assert await greedy(wire) == pytest.approx(before, abs=1e-3)


async def test_a_cancelled_generation_is_aborted(wire: Wire) -> None:
    engine = client(wire)
    request = GenerateRequest(request_id=RequestId("gone"), input_ids=(1,), max_new_tokens=1000)
    task = asyncio.get_running_loop().create_task(engine.generate(request))
    await wire.until(running=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wire.until(running=0)


async def test_the_client_maps_every_finish_reason(wire: Wire) -> None:
    engine = client(wire)
    request = GenerateRequest(
        request_id=RequestId("s"), input_ids=(1,), max_new_tokens=50, stop_token_ids=tuple(range(VOCABULARY))
    )
    done = await engine.generate(request)
    assert (done.finish, len(done.output_ids)) == (FinishReason.STOP, 1)


async def test_a_bad_model_directory_is_a_one_line_error(embedded: Wire, tmp_path: Path, write_model) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineStartFailed, match=r"tokenizer\.json") as failed:
        async with EngineProcess(EngineProcessConfig(model=directory, directory=tmp_path)):
            pass
    assert "Traceback" not in str(failed.value)
