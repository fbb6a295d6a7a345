"""Pushes of a mixture of experts to SGLang, as one tensor for each expert and as one for all, by group and by disk.

The reference is transformers' forward pass of the pushed weights in float32.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, GenerateRequest, RequestId
from headrace.policies.push.contract import EnginePush, PushConfig
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.execution import push
from headrace.policies.push.machine import PushOutcome, PushStep
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from support import push_rig
from support.engine_kinds import engine_process, kind_dialect
from support.tiny_model import write_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
EXPERTS = 4
ERROR = 1e-3


def write_experts(folder: Path, seed: int, *, joined: bool = False) -> Path:
    """Write a random tiny Qwen3-MoE as transformers saves it, or with all experts of a layer in one tensor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder.mkdir()
    vocabulary = write_tokenizer(folder / "tokenizer.json")
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        # Large enough that the logits depend on the experts.
        initializer_range=0.2,
        eos_token_id=vocabulary - 1,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"num_experts": EXPERTS}))
    if joined:
        tensors = load_file(folder / "model.safetensors")
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.{expert}.{kind}_proj.weight") for expert in range(EXPERTS)])
                for kind in ("gate", "up", "down")
            )
            tensors |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Rig:
    engine: SGLangEngine
    sender: SenderProcess
    directories: SnapshotDirectories
    verify: str
    gate: push_rig.RecordingGate = field(default_factory=push_rig.RecordingGate)
    pushes: int = 0

    async def push(self, model: Path, transport: str) -> EnginePush:
        self.pushes += 1
        settings = {"transport": transport, "verify": self.verify, "bucket_bytes": 20_000, "phase_timeout_s": 60.0}

        async def journal(_: str, __: PushStep) -> None:
            """Nothing is recovered here."""

        report = await push(
            push_rig.snapshot(model, self.pushes),
            [self.engine],
            self.sender,
            self.gate,
            journal,
            PushConfig.model_validate(settings | {"pause_mode": "abort"}),
            directories=self.directories,
        )
        return report.engines[0]

    async def error(self, model: Path) -> float:
        """Return the largest difference of an answer's log-probabilities to those of a model's weights."""
        from transformers import Qwen3MoeForCausalLM

        request = GenerateRequest(request_id=RequestId(f"r{self.pushes}"), input_ids=(5, 6, 7), max_new_tokens=20)
        done = await self.engine.generate(request)
        reference = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        ids = [5, 6, 7, *done.output_ids]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0, 2:-1].log_softmax(-1)
        expected = logprobs[torch.arange(len(done.output_ids)), torch.tensor(done.output_ids)]
        return (torch.tensor(done.logprobs) - expected).abs().max().item()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("experts")
    model = write_experts(folder / "served", 0)
    process = engine_process("sglang", model, folder)
    verify = "snapshot" if kind_dialect("sglang").version == "0.5.23" else "off"
    async with process, SenderProcess(SenderConfig()) as sender, aiohttp.ClientSession() as session:
        engine = SGLangEngine(EngineId("e"), process.url, session, SGLangConfig(vocab_size=258))
        rig = Rig(engine, sender, SnapshotDirectories(folder / "weights", model, DirectoryReaders()), verify)
        assert await rig.error(model) < ERROR
        yield rig


@pytest.mark.parametrize(("transport", "seed"), [("group", 1), ("disk", 6)])
async def test_experts_one_by_one_are_pushed(rig: Rig, tmp_path: Path, transport: str, seed: int) -> None:
    model = write_experts(tmp_path / "model", seed)
    assert await rig.error(model) > 100 * ERROR
    part = await rig.push(model, transport)
    assert part.outcome is PushOutcome.UPDATED, part
    assert await rig.error(model) < ERROR


async def test_joined_experts_are_pushed_by_group(rig: Rig, tmp_path: Path) -> None:
    model, same = write_experts(tmp_path / "model", 2, joined=True), write_experts(tmp_path / "same", 2)
    assert await rig.error(same) > 100 * ERROR
    part = await rig.push(model, "group")
    assert part.outcome is PushOutcome.UPDATED, part
    assert await rig.error(same) < ERROR


async def test_joined_experts_are_refused_by_disk(rig: Rig, tmp_path: Path) -> None:
    """SGLang would skip them without an error, and serve the old ones."""
    before = write_experts(tmp_path / "before", 3)
    assert (await rig.push(before, "disk")).outcome is PushOutcome.UPDATED
    part = await rig.push(write_experts(tmp_path / "model", 4, joined=True), "disk")
    assert part.outcome is PushOutcome.QUARANTINED
    assert "would skip the experts of the snapshot" in part.failure
    assert 'set push.transport = "group"' in part.failure
    assert await rig.error(before) < ERROR


async def test_the_loader_skips_joined_experts_without_an_error(rig: Rig, tmp_path: Path) -> None:
    """Why they are announced one by one. If this fails, a new SGLang reads them: see READS_SINGLE_EXPERTS."""
    before = write_experts(tmp_path / "before", 5)
    assert (await rig.push(before, "group")).outcome is PushOutcome.UPDATED
    joined = write_experts(tmp_path / "model", 5, joined=True)
    tensors = load_file(joined / "model.safetensors")
    changed = {name: tensor * (2 if ".experts." in name else 1) for name, tensor in tensors.items()}
    save_file(changed, joined / "model.safetensors", metadata={"format": "pt"})
    await rig.engine.update_from_disk(joined, version=PolicyVersion(1, 99))
    assert await rig.error(before) < ERROR
