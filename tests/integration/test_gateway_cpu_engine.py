"""Gateway with a real engine process: the captured tokens are those that the model sampled, position by position."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import numpy as np
import pytest

from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.models.tiny import model_config, write_description
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, Sampling, SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable

ADMIN = "an admin token of enough letters"
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy's tokenizer and template with random weights, far from uniform."""
    import torch
    from safetensors.torch import save_file

    from headrace.policies.models.qwen_config import QwenConfig

    folder: Path = tmp_path_factory.mktemp("policy") / "model"
    write_description(folder)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in QwenConfig.from_keys(model_config(), source="tiny").shapes().items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * (0.3 if "embed" in name else shape[1] ** -0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def recomputed(model_dir: Path, tokens: list[int], temperature: float = TEMPERATURE) -> np.ndarray:
    """Log-probability of each token but the first under the temperature-scaled model, (T,) with 0 in front."""
    import torch

    from headrace.policies.models.qwen import Qwen, read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    config = QwenConfig.read(model_dir / "config.json")
    model = Qwen(config, read_weights(config, model_dir), capacity=1024)
    log_probabilities_TV = torch.log_softmax(model.logits([tokens])[0] / temperature, -1)
    taken = log_probabilities_TV[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], taken.numpy()]).astype(np.float32)


async def converse(http: aiohttp.ClientSession, base_url: str, turns: int) -> None:
    messages = [{"role": "user", "content": "write alpha to a.txt"}]
    for turn in range(turns):
        async with http.post(f"{base_url}/v1/chat/completions", json={"messages": messages}) as response:
            assert response.status == 200, await response.text()
            text = (await response.json())["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"output {turn}"}]


@pytest.mark.core
@pytest.mark.parametrize("token_kinds", [False, True])
async def test_captured_logprobs_match_the_models(model_dir: Path, tmp_path: Path, token_kinds: bool) -> None:
    gateway = Gateway(GatewayConfig(tokenizer_dir=model_dir, token_kinds=token_kinds), ADMIN)
    budgets = Budgets(max_tokens_per_turn=12, max_context_tokens=512)
    spec = SessionSpec(session_id=SessionId("r"), sampling=Sampling(temperature=TEMPERATURE), budgets=budgets)
    process = EngineProcess(EngineProcessConfig(model=model_dir, directory=tmp_path, weight_version="1.3"))
    url = await gateway.start()
    async with (
        gateway,
        process as engine,
        GatewayClient(url, ADMIN) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
    ):
        route = EngineRoute(engine_id=EngineId("cpu"), url=engine.url)
        await gateway.set_engines(RoutingTable(version=1, engines=(route,)))
        opened = await client.open(spec)
        await converse(http, opened.base_url, turns=3)
        report = await client.finish(opened.session_id)
    assert isinstance(report, SessionReport)
    assert (report.turns, report.rerendered, report.failures) == (3, 0, ())
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    assert 3 <= int(row.loss_mask_T.sum()) == report.trained_tokens <= 36
    assert {span.version for span in row.versions} == {PolicyVersion(1, 3)}
    expected = recomputed(model_dir, row.tokens_T.tolist())
    assert np.abs(expected - row.logprobs_T)[row.loss_mask_T].max() < 1e-3
    assert expected[row.loss_mask_T].std() > 0.1, "near-uniform log-probabilities would prove nothing"
    if not token_kinds:
        assert row.kinds_T is None
        return
    assert row.kinds_T is not None
    assert np.array_equal(row.kinds_T == TokenKind.SAMPLED, row.loss_mask_T)
    tokenizer = ChatTokenizer(model_dir)
    for kind, words in ((TokenKind.PROMPT, "write alpha to a.txt"), (TokenKind.OBSERVATION, "output 0output 1")):
        said = tokenizer.spell(row.tokens_T[row.kinds_T == kind].tolist())
        assert said.replace(" ", "") == words.replace(" ", "")


async def test_a_stop_string_ends_a_turn_that_is_continued(model_dir: Path, tmp_path: Path) -> None:
    """F15 with a real engine: the policy goes on from exactly the ids that it sampled up to the stop string."""
    # Nearly uniform, so that a letter comes soon.
    stops, inserted = list("aeioustrnldchpmw"), " <information>moss</information> "
    spec = SessionSpec(session_id=SessionId("r"), sampling=Sampling(temperature=5.0))
    process = EngineProcess(EngineProcessConfig(model=model_dir, directory=tmp_path, weight_version="1.3"))
    gateway = Gateway(GatewayConfig(tokenizer_dir=model_dir), ADMIN)
    url = await gateway.start()
    async with (
        gateway,
        process as engine,
        GatewayClient(url, ADMIN) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
    ):
        route = EngineRoute(engine_id=EngineId("cpu"), url=engine.url)
        await gateway.set_engines(RoutingTable(version=1, engines=(route,)))
        opened = await client.open(spec)
        text = ""
        for turn in range(4):
            asked = {"role": "user", "content": "write alpha to a.txt"}
            body = {"messages": [asked], "stop": stops, "include_stop_str_in_output": True, "max_tokens": 64}
            if turn:
                body |= {"messages": [asked, {"role": "assistant", "content": text}], "continue_final_message": True}
            async with http.post(f"{opened.base_url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                [choice] = (await response.json())["choices"]
            assert choice["stop_reason"] in stops
            assert choice["message"]["content"].endswith(choice["stop_reason"])
            text += choice["message"]["content"] + inserted
        report = await client.finish(opened.session_id)
    assert isinstance(report, SessionReport)
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    assert (report.turns, report.rerendered, report.failures) == (4, 0, ())
    assert set(report.masked) <= {"stop_border"}
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    expected = recomputed(model_dir, row.tokens_T.tolist(), 5.0)
    assert np.abs(expected - row.logprobs_T)[row.loss_mask_T].max() < 1e-3
