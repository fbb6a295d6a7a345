"""A learner and SGLang on one CUDA device: the engine maps the learner's tensors, no byte leaves the device.

`scripts/test -m gpu` on a host with a CUDA device, with HEADRACE_SGLANG_CUDA_PYTHON naming the python of an environment
in which SGLang is installed with all that it asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from headrace.policies.engine import EngineId, GenerateRequest, PauseMode, RequestId
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.one_thread import MegatronLearner
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]
PYTHON = "HEADRACE_SGLANG_CUDA_PYTHON"
PROMPT = (10, 20, 30)
MEAN_ERROR, MAX_ERROR = 0.02, 0.1
"""Of log-probabilities in bfloat16."""


@pytest.fixture(scope="module")
def cuda_python() -> Path:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if PYTHON not in os.environ:
        pytest.skip(f"{PYTHON} names no python of an environment with SGLang for CUDA")
    return Path(os.environ[PYTHON])


async def test_an_engine_receives_a_learners_tensors_on_the_same_device(
    cuda_python: Path, tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    served, learned = (write_model(tmp_path / f"model{seed}", seed=seed) for seed in range(2))
    config = SGLangServerConfig(
        model=served,
        directory=tmp_path / "engine",
        device="cuda",
        python=cuda_python,
        dtype="bfloat16",
        max_context=1024,
        arguments=("--mem-fraction-static", "0.3"),
    )
    learner = MegatronLearner(
        LearnerConfig(model_dir=learned, checkpoint_dir=tmp_path / "checkpoints", snapshot_dir=tmp_path / "weights")
    )
    async with SGLangProcess(config) as process, aiohttp.ClientSession() as session:
        engine = SGLangEngine(EngineId("e"), process.url, session, SGLangConfig(vocab_size=258))
        try:
            await learner.open(None, epoch=2)
            snapshot = await learner.snapshot()
            await push_tensors(snapshot, engine)
        finally:
            await learner.close()
        done = await engine.generate(
            GenerateRequest(request_id=RequestId("r"), input_ids=PROMPT, max_new_tokens=200, temperature=1.0)
        )
    assert {span.version for span in done.spans} == {snapshot.version}
    model = Qwen3ForCausalLM.from_pretrained(learned, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *done.output_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(done.output_ids)), torch.tensor(done.output_ids)]
    error = (torch.tensor(done.logprobs) - expected).abs()
    print(f"{len(error)} tokens, mean {error.mean():.5f}, max {error.max():.5f}")
    assert error.mean() <= MEAN_ERROR
    assert error.max() <= MAX_ERROR


async def push_tensors(snapshot: WeightsSnapshot, engine: SGLangEngine) -> None:
    """The tensors stay this process's until the session has ended: the engine reads them in place."""
    tensors = [item for shard in snapshot.shards for item in load_file(shard.path, device="cuda").items()]
    await engine.pause(PauseMode.RETRACT)
    await engine.begin_update()
    await engine.update_from_tensors([bytes(ForkingPickler.dumps(tensors))], version=snapshot.version)
    await engine.end_update()
    await engine.flush()
    await engine.resume()
