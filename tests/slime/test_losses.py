"""headrace's objectives without a cap have the gradients of slime's own `loss_function`, which runs unmodified."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.buffer.trajectories.types import Batch
from headrace.policies.learners.micro_batches import collate, weighted_rows
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.loss import weighted_loss
from support.objective_cases import logprobs_of, make_batch, make_row, objective_of

ROOT = Path(__file__).resolve().parents[2]
CHECKOUTS = {name: os.environ.get(name, "") for name in ("SLIME_DIR", "MEGATRON_DIR")}
VOCABULARY = 23
TEMPERATURE = 0.8
MICRO_BATCHES = ((0, 3), (1, 2, 4))
"""The two rows of the first rollout, 0 and 1, are in different micro-batches."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"correction": "none"}, {"advantage_estimator": "grpo"}),
    "gspo": (
        {"correction": "none", "objective": "gspo", "eps_low": 0.03, "eps_high": 0.04},
        {"advantage_estimator": "gspo", "eps_clip": 0.03, "eps_clip_high": 0.04},
    ),
    "cispo": ({"correction": "none", "objective": "cispo"}, {"advantage_estimator": "cispo"}),
    "dual clip": ({"correction": "none", "dual_clip": 1.5}, {"advantage_estimator": "grpo", "eps_clip_c": 1.5}),
    "sequence mask": (
        {"correction": "none", "sequence_mask": 0.02},
        {"advantage_estimator": "grpo", "use_opsm": True, "opsm_delta": 0.02},
    ),
    "entropy": (
        {"correction": "none", "entropy_coef": 0.3},
        {"advantage_estimator": "grpo", "entropy_coef": 0.3},
    ),
    **{
        kind: (
            {"correction": "none", "kl_coef": 0.2, "kl_kind": kind},
            {"advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": slimes},
        )
        for kind, slimes in (("k1", "k1"), ("k2", "k2"), ("k3", "low_var_kl"))
    },
}
"""Settings of headrace, and slime's flags for the same loss."""


@pytest.fixture(scope="module")
def slimes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of each case, by slime."""
    for name, folder in CHECKOUTS.items():
        if not folder:
            pytest.skip(f"{name} is not set: it names a checkout outside the repository")
    folder = tmp_path_factory.mktemp("slime")
    batch, logits = the_batch(), the_logits()
    common = {"eps_clip": 0.2, "eps_clip_high": 0.28, "rollout_temperature": TEMPERATURE}
    cases = [
        {
            "flags": common | flags,
            "rows": slime_rows(batch),
            "logits": torch.cat(logits),
            "rollouts": len(batch.items),
            "micro_batches": MICRO_BATCHES,
        }
        for _, flags in CASES.values()
    ]
    torch.save(cases, folder / "in")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((*CHECKOUTS.values(), str(ROOT / "tests"))),
        # slime compiles small functions, which needs a C++ compiler and half a minute.
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "support.slime_losses", str(folder / "in"), str(folder / "out")]
    subprocess.run(command, check=True, env=environment, cwd=folder, timeout=300)
    return dict(zip(CASES, torch.load(folder / "out"), strict=True))


def the_batch() -> Batch:
    """Four rollouts, of which the first has two rows; ratios are on both sides of every bound."""
    generator = np.random.default_rng(5)
    logits = the_logits()
    rows = []
    for index, length in enumerate(LENGTHS):
        tokens = generator.integers(0, VOCABULARY, size=length)
        mask = generator.random(length) < 0.7
        mask[: 2 + index] = False
        mask[-1] = True
        current = (logits[index] / TEMPERATURE).log_softmax(-1)[:-1].gather(-1, torch.from_numpy(tokens[1:, None]))
        drift = generator.normal(0, 0.05) + generator.normal(0, 0.4, size=length)
        rows.append(make_row(tokens.tolist(), mask.tolist(), np.concatenate([[0.0], current[:, 0].numpy()]) - drift))
    items = [(1.2, rows[:2]), (-0.7, rows[2:3]), (-1.5, rows[3:4]), (0.4, rows[4:])]
    return make_batch(items, temperature=TEMPERATURE)


LENGTHS = (12, 9, 15, 20, 11)


def the_logits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, VOCABULARY, generator=generator) for length in LENGTHS]


def reference_logits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [logits + 1.5 * torch.randn(logits.shape, generator=generator) for logits in the_logits()]


def slime_rows(batch: Batch) -> list[dict[str, Any]]:
    """The rows in slime's form: a prompt, which ends before the first trained token, and a response with a mask."""
    rows = []
    references = iter(reference_logits())
    for item in batch.items:
        mask_sum = sum(int(row.loss_mask_T.sum()) for row in item.trajectory.rows)
        for row in item.trajectory.rows:
            start = int(row.loss_mask_T.argmax())
            tokens = torch.from_numpy(row.tokens_T.astype(np.int64))
            logprobs = (next(references) / TEMPERATURE).log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
            rows.append(
                {
                    "tokens": tokens,
                    "loss_mask": torch.from_numpy(row.loss_mask_T[start:].astype(np.int64)),
                    "mask_sum": torch.tensor(mask_sum),
                    "behaviour": torch.from_numpy(row.logprobs_T[start:].copy()),
                    "reference": logprobs[start - 1 :],
                    "advantage": item.advantage,
                }
            )
    return rows


def padded(logits: list[torch.Tensor], indices: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([logits[index] for index in indices], batch_first=True)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_slimes_loss_function(
    name: str, slimes: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    config = ObjectiveConfig(**CASES[name][0])
    objective = objective_of(config)
    rows = weighted_rows(the_batch(), objective, config)
    logits = [tensor.requires_grad_() for tensor in the_logits()]
    for indices in MICRO_BATCHES:
        micro = collate([rows[index] for index in indices], torch.device("cpu"))
        logprobs, entropies = logprobs_of(padded(logits, indices), micro)
        reference, _ = logprobs_of(padded(reference_logits(), indices), micro)
        tokens = micro.trained_tokens(logprobs, entropies, reference)
        loss, _ = weighted_loss(tokens, micro.weights_N, objective, config)
        loss.backward()
    _, expected = slimes[name]
    gradient = torch.cat([tensor.grad for tensor in logits if tensor.grad is not None])
    assert float(expected.norm()) > 0.1
    assert float((gradient - expected).abs().max()) <= 1e-6


def test_every_case_has_a_gradient_of_its_own(slimes: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """So that no clip, mask or term is left out because the batch does not reach it."""
    gradients = [gradient for _, gradient in slimes.values()]
    for index, one in enumerate(gradients):
        assert all(float((one - other).abs().max()) > 1e-3 for other in gradients[:index])
