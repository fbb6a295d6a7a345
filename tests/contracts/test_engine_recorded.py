"""What SGLang answered when it was last asked (tests/golden/sglang-VERSION), where it is not installed too.

Our embedded engine must answer the same keys, types, statuses and kinds of refusal; our client must read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies import errors
from headrace.policies.engine import EngineId, FinishReason
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.replies import error_text, parse_completion
from headrace.policies.sglang.transport import refusal
from headrace.policies.sglang.versions import DEFAULT_VERSION
from support import engine_exchanges as exchanges
from support import engine_kinds as kinds
from support.loopback import on_loopback

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

GENERATED = {
    "generate": FinishReason.LENGTH,
    "generate_stop": FinishReason.STOP,
    "aborted_running": FinishReason.ABORT,
    "aborted_retracted": FinishReason.ABORT,
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    replies: dict[str, Any] = json.loads((GOLDEN / f"sglang-{DEFAULT_VERSION}" / "replies.json").read_text())
    return replies


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("sglang", marks=pytest.mark.sglang)])
async def test_an_engine_answers_as_recorded(
    kind: str,
    recorded: dict[str, Any],
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    if kind == "sglang" and kinds.SGLANG_VERSION != DEFAULT_VERSION:
        pytest.skip(f"SGLang {kinds.SGLANG_VERSION} was not recorded")
    process = kinds.engine_process(kind, tiny_model_dir, tmp_path, report_times=False)
    async with process, aiohttp.ClientSession() as session:
        answered = await exchanges.exchange(session, process.url)
    wrong = []
    for name, expected in recorded.items():
        got = answered[name]
        if got["status"] != expected["status"]:
            wrong.append(f"{name}: {got['status']} instead of {expected['status']}: {got['reply']}")
        elif expected["status"] == 200:
            exact = name in GENERATED
            wrong += exchanges.differences(expected["reply"], got["reply"], name, exact=exact)
        elif kind_of(expected) is not kind_of(got) and not (kind == "cpu" and name in exchanges.NOT_OURS):
            wrong.append(f"{name}: {kind_of(got).__name__} instead of {kind_of(expected).__name__}")
    assert wrong == []


def kind_of(answer: dict[str, Any]) -> type[errors.EngineRefused]:
    text = error_text(json.dumps(answer["reply"]).encode())
    return type(refusal(answer["status"], answer["path"], text, "e"))


@pytest.mark.parametrize("name", GENERATED)
def test_the_client_parses_recorded_completions(recorded: dict[str, Any], name: str) -> None:
    done = parse_completion(recorded[name]["reply"])
    assert done.finish is GENERATED[name]
    assert len(done.output_ids) == len(done.logprobs) > 0
    assert {span.version for span in done.spans} == {PolicyVersion(1, 0)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("begun_twice", errors.SessionAlreadyOpen),
        ("end_without", errors.NoSession),
        ("update_without", errors.NoSession),
        ("update_unknown_group", errors.UnknownGroup),
        ("tensors_without", errors.NoSession),
        ("disk_nowhere", errors.EngineRefused),
        ("destroy_unknown", errors.UnknownGroup),
        ("long_prompt", errors.PromptTooLong),
    ],
)
def test_recorded_refusals_raise_typed_errors(
    recorded: dict[str, Any], name: str, kind: type[errors.EngineRefused]
) -> None:
    assert recorded[name]["status"] == 400
    assert kind_of(recorded[name]) is kind


def test_a_refused_prompt_names_the_limit(recorded: dict[str, Any]) -> None:
    refused = refusal(400, "/generate", error_text(json.dumps(recorded["long_prompt"]["reply"]).encode()), "e")
    assert isinstance(refused, errors.PromptTooLong)
    assert refused.limit == 1024


def test_a_refused_sum_of_prompt_and_new_tokens_names_the_limit() -> None:
    """The sentence of SGLang's tokenizer manager for prompts that fit without the tokens to sample."""
    sentence = (
        "Requested token count exceeds the model's maximum context length of 2048 tokens. You requested a total of "
        "2100 tokens: 100 tokens from the input messages and 2000 tokens for the completion."
    )
    refused = refusal(400, "/generate", sentence, "e")
    assert isinstance(refused, errors.PromptTooLong)
    assert refused.limit == 2048


async def test_the_client_parses_recorded_server_information(recorded: dict[str, Any]) -> None:
    app = web.Application()
    for name in ("server_info", "model_info", "loads", "ready_paused", "health_paused"):
        app.router.add_get(recorded[name]["path"], answering(recorded[name]))
    app.router.add_post(recorded["checksums"]["path"], answering(recorded["checksums"]))
    async with on_loopback(app) as url, aiohttp.ClientSession() as session:
        engine = SGLangEngine(EngineId("e"), url, session, SGLangConfig(vocab_size=258))
        info = await engine.info()
        await engine.health()
        sums = await engine.checksums()
    assert (info.server_version, info.version, info.ranks) == (DEFAULT_VERSION, PolicyVersion(1, 0), 1)
    assert (info.paused, info.running, info.max_context_tokens) == (True, 0, 1024)
    assert (info.update_session, info.version_spans) == (True, True)
    assert list(sums) == ["model.norm.weight"]


def answering(recorded: dict[str, Any]) -> Any:
    async def answer(_: web.Request) -> web.Response:
        reply = recorded["reply"]
        text = reply if isinstance(reply, str) else json.dumps(reply)
        return web.Response(status=recorded["status"], text=text, content_type="application/json")

    return answer


def test_recordings_contain_nothing_machine_specific() -> None:
    for path in GOLDEN.glob("sglang-*/*.json"):
        text = path.read_text()
        assert len(text) < 40_000
        assert "site-packages" not in text
        assert "/root" not in text
        assert "/tmp" not in text
