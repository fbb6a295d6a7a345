"""The learner bench: throughput beside a plain PyTorch loop, peak memory, padding, and the time that a save takes.

Learner and loop take their steps in turn, in one process and thread; the fastest step of each counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benches.learner.memory import head_memory_ratio, peak_bytes
from benches.learner.plain_loop import PlainLoop
from benches.learner.sizes import SIZES
from headrace.buffer.trajectories.packing import pack
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchItem,
    BatchLease,
    GroupId,
    RolloutId,
    Row,
    Trajectory,
    VersionSpan,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.megatron_trainer import MegatronTrainer, open_trainer
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.models.tiny import model_config, write_description

LENGTHS: Final = (900, 850, 700, 640, 420, 400, 310, 120)
TRAINED_SHARE: Final = 0.3
TOKEN_BUDGET: Final = 2048
LONG_ROW: Final = 2048
"""Length of the shorter of the two rows whose peaks are compared."""
LEARNING_RATE: Final = 1e-6
BOUNDS: Final = {
    "throughput_ratio": (0.8, math.inf),
    "peak_ratio_of_twice_the_length": (0.0, 2.2),
    "head_memory_ratio": (0.0, 0.2),
}
"""Smallest and largest value allowed."""


def measure(folder: Path, *, repeats: int) -> dict[str, float]:
    """Return the figures of `scripts/bench learner`; `repeats` steps of learner and loop are compared."""
    model_dir = folder / "model"
    write_model(model_dir)
    config = LearnerConfig(
        model_dir=model_dir,
        checkpoint_dir=folder / "checkpoints",
        snapshot_dir=folder / "weights",
        learning_rate=LEARNING_RATE,
        token_budget=2 * LONG_ROW,
    )
    packing = config.model_copy(update={"token_budget": TOKEN_BUDGET})
    trainer = open_trainer(packing, None, 1)
    try:
        figures = compare(trainer, model_dir, repeats)
        started_s = time.perf_counter()
        trainer.save()
        figures["save_stall_s"] = time.perf_counter() - started_s
    finally:
        trainer.close()
    trainer = open_trainer(config, None, 1)
    try:
        figures |= measure_peaks(trainer)
    finally:
        trainer.close()
    head = head_memory_ratio(positions=4096, hidden=256, vocabulary=16_384, trained_share=0.05)
    return figures | {"head_memory_ratio": head}


def compare(trainer: MegatronTrainer, model_dir: Path, repeats: int) -> dict[str, float]:
    """Return the figures of steps on one batch by the learner and by the plain loop."""
    shape = QwenConfig.read(model_dir / "config.json")
    loop = PlainLoop(shape, load_file(model_dir / "model.safetensors"), learning_rate=LEARNING_RATE)
    items = make_items(LENGTHS, loop)
    packs = pack(LENGTHS, token_budget=TOKEN_BUDGET)
    learner_s, loop_s = [], []
    for number in range(repeats + 1):
        started_s = time.perf_counter()
        report = trainer.step(make_batch(items, f"throughput-{number}"))
        between_s = time.perf_counter()
        norm = loop.step(items, packs)
        learner_s.append(between_s - started_s)
        loop_s.append(time.perf_counter() - between_s)
        if not number:
            # Otherwise one of them computes something else, and the ratio of their times means nothing.
            assert math.isclose(report.metrics["grad_norm"], norm, rel_tol=1e-3), (report.metrics, norm)
    padded = sum(len(indices) * LENGTHS[indices[0]] for indices in packs)
    # The first steps allocate the moments.
    return {
        "throughput_ratio": min(loop_s[1:]) / min(learner_s[1:]),
        "tokens_per_s": sum(LENGTHS) / min(learner_s[1:]),
        "padding_share": 1 - sum(LENGTHS) / padded,
    }


def measure_peaks(trainer: MegatronTrainer) -> dict[str, float]:
    """Return the peak memory of a step on one row, and its ratio for a row of twice the length."""
    peaks = []
    trainer.step(make_batch(make_items((64,), None), "warm-up"))
    for length in (LONG_ROW, 2 * LONG_ROW):
        batch = make_batch(make_items((length,), None), f"row-{length}")
        peaks.append(peak_bytes(lambda batch=batch: trainer.step(batch)))  # type: ignore[misc]
    return {"peak_mb": peaks[0] / 1e6, "peak_ratio_of_twice_the_length": peaks[1] / peaks[0]}


def misses(figures: dict[str, float]) -> list[str]:
    """Return the names of the figures that are out of bounds."""
    return [name for name, (low, high) in BOUNDS.items() if not low <= figures[name] <= high]


def write_model(model_dir: Path, sizes: Mapping[str, int] = SIZES) -> None:
    """Write a random model directory; `sizes` are keys of its config.json."""
    write_description(model_dir)
    keys = {**model_config(), **sizes}
    (model_dir / "config.json").write_text(json.dumps(keys))
    generator = torch.Generator().manual_seed(0)
    shapes = QwenConfig.from_keys(keys, source="bench").shapes()
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


def make_items(
    lengths: Sequence[int], policy: PlainLoop | None, vocabulary: int = SIZES["vocab_size"]
) -> list[BatchItem]:
    """Return rollouts of one random row each, with the log-probabilities of `policy` (without it, those of a uniform
    one)."""
    generator, version = np.random.default_rng(0), PolicyVersion(1, 0)
    items = []
    for number, length in enumerate(lengths):
        prompt = round(length * (1 - TRAINED_SHARE))
        trained = np.arange(length) >= prompt
        row = Row(
            tokens_T=generator.integers(0, vocabulary, size=length).astype(np.int32),
            loss_mask_T=trained,
            logprobs_T=np.where(trained, -math.log(vocabulary), 0.0).astype(np.float32),
            versions=(VersionSpan(start=prompt, end=length, version=version),),
        )
        item = BatchItem(
            rollout_id=RolloutId(f"r{number}"),
            group_id=GroupId("g"),
            attempt=1,
            reward=1.0,
            advantage=1.0 if number % 2 else -1.0,
            staleness=0,
            trajectory=Trajectory(rows=(row,), temperature=1.0),
        )
        if policy is not None:
            with torch.no_grad():
                row.logprobs_T[prompt:] = policy.logprobs([item]).numpy()
        items.append(item)
    return items


def make_batch(items: Sequence[BatchItem], name: str) -> Batch:
    return Batch(lease=BatchLease(batch_id=BatchId(name), epoch=1), version=PolicyVersion(1, 0), items=tuple(items))
