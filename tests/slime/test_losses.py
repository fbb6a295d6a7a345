"""headrace's objectives have the gradients of slime's own `loss_function`, which runs unmodified with the flags, data
and hooks of the slime learner."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, StepScores, TokenSpan
from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.types import Batch
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.micro_batches import collate, weighted_rows
from headrace.policies.learners.objectives.loss import weighted_loss
from headrace.policies.learners.objectives.observation import observation_loss
from headrace.policies.learners.slime import arguments, batches
from headrace.policies.learners.slime.arguments import SlimeTerms
from support.objective_cases import logprobs_of, make_batch, make_row, objective_of

ROOT = Path(__file__).resolve().parents[2]
CHECKOUTS = {name: os.environ.get(name, "") for name in ("SLIME_DIR", "MEGATRON_DIR")}
VOCABULARY = 23
TEMPERATURE = 0.8
MICRO_BATCHES = ((0, 3), (1, 2, 4))
"""The two rows of the first rollout, 0 and 1, are in different micro-batches."""

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"objective": "gspo", "eps_low": 0.03, "eps_high": 0.04},
    "cispo": {"objective": "cispo"},
    "dual clip": {"dual_clip": 1.5},
    "tis": {"correction": "tis", "weight_cap": 1.4},
    "icepop": {"correction": "icepop", "weight_floor": 0.7, "weight_cap": 1.5},
    "sequence mask": {"sequence_mask": 0.02},
    "entropy": {"entropy_coef": 0.3},
    "token": {"loss_weight": "token"},
    "constant": {"loss_weight": "constant", "loss_constant": 6.5, "entropy_coef": 0.3},
    "observations": {"observation_coef": 0.5},
    "observations over tokens": {
        "correction": "tis",
        "observation_coef": 0.5,
        "observation_mean": "token",
        "observation_target": "full",
    },
    **{kind: {"kl_coef": 0.2, "kl_kind": kind} for kind in ("k1", "k2", "k3")},
}
"""Keys of [learner]."""
TWICE = "corrected twice"
CORRECTED_TWICE = {
    "--get-mismatch-metrics": "",
    "--custom-tis-function-path": "slime.backends.megatron_utils.loss.vanilla_tis_function",
}
"""Flags beside those of grpo: slime applies a function for mismatch metrics to the loss as well."""


def batch_for(config: LearnerConfig) -> Batch:
    """slime's GSPO has one gradient for all tokens of a row: turns with advantages of their own are refused there."""
    return the_batch(turns=config.objective != "gspo")


def terms_of(keys: dict[str, Any]) -> SlimeTerms:
    folders = {"model_dir": "/model", "checkpoint_dir": "/run/checkpoints", "snapshot_dir": "/run/weights"}
    learner = LearnerConfig.model_validate({"kind": "slime", "slime": {"gpus_per_node": 1}, **folders, **keys})
    terms = SlimeTerms(learner=learner, batch_size=4, temperature=TEMPERATURE, steps=1)
    assert arguments.problem(terms) is None
    return terms


@pytest.fixture(scope="module")
def slimes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of each case, by slime."""
    for name, folder in CHECKOUTS.items():
        if not folder:
            pytest.skip(f"{name} is not set: it names a checkout outside the repository")
    folder = tmp_path_factory.mktemp("slime")
    logits, cases = the_logits(), []
    for name, keys in {**CASES, TWICE: {}}.items():
        terms = terms_of(keys)
        batch = batch_for(terms.learner)
        flags = {flag.name: " ".join(flag.values) for flag in arguments.flags(terms, load=Path("/model"))}
        flags |= CORRECTED_TWICE if name == TWICE else {}
        rows = slime_rows(batch, terms.learner)
        cases.append(
            {
                "flags": flags,
                "rows": rows,
                "logits": torch.cat(logits),
                "rollouts": len(batch.items),
                "micro_batches": MICRO_BATCHES,
            }
        )
    torch.save(cases, folder / "in")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((*CHECKOUTS.values(), str(ROOT / "tests"))),
        # slime compiles small functions, which needs a C++ compiler and half a minute.
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "support.slime_losses", str(folder / "in"), str(folder / "out")]
    subprocess.run(command, check=True, env=environment, cwd=folder, timeout=300)
    return dict(zip((*CASES, TWICE), torch.load(folder / "out"), strict=True))


def the_batch(*, turns: bool = True) -> Batch:
    """Four rollouts, of which the first has two rows, and the second a turn with an advantage of its own; ratios are on
    both sides of every bound."""
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
        kinds = np.where(mask, TokenKind.SAMPLED, generator.choice(list(TokenKind)[:-1], size=length))
        behaviour = np.concatenate([[0.0], current[:, 0].numpy()]) - drift
        rows.append(make_row(tokens.tolist(), mask.tolist(), behaviour, kinds.tolist()))
    items = [(1.2, rows[:2]), (-0.7, rows[2:3]), (-1.5, rows[3:4]), (0.4, rows[4:])]
    batch = make_batch(items, temperature=TEMPERATURE)
    if not turns:
        return batch
    # A turn with an advantage of its own: the second half of the third row.
    span = TokenSpan(0, LENGTHS[2] // 2, LENGTHS[2])
    scores = StepScores(credit=Credit.STEPS, outcome=0.0, coefficient=1.0, steps=(ScoredStep(2, 1.0, (span,)),))
    judged = replace(batch.items[1], scores=scores, turn_advantages={2: 0.9})
    return replace(batch, items=(batch.items[0], judged, *batch.items[2:]))


LENGTHS = (12, 9, 15, 20, 11)


def the_logits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, VOCABULARY, generator=generator) for length in LENGTHS]


def reference_logits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [logits + 1.5 * torch.randn(logits.shape, generator=generator) for logits in the_logits()]


def slime_rows(batch: Batch, config: LearnerConfig) -> list[dict[str, Any]]:
    """The rows as the slime learner hands them to a rank, with the log-probabilities of the reference."""
    limits = RowLimits(vocabulary=VOCABULARY, tokens=100)
    data = batches.train_data(batch, limits, config, temperature=TEMPERATURE)
    rows = [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]
    for row, logits in zip(rows, reference_logits(), strict=True):
        tokens = torch.from_numpy(row["tokens"].astype(np.int64))
        logprobs = (logits / TEMPERATURE).log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        row["ref_log_probs"] = logprobs[-row["response_lengths"] :]
    return rows


def padded(logits: list[torch.Tensor], indices: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([logits[index] for index in indices], batch_first=True)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_slimes_loss_function(
    name: str, slimes: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    config = terms_of(CASES[name]).learner
    objective = objective_of(config)
    rows = weighted_rows(batch_for(config), objective, config)
    logits = [tensor.requires_grad_() for tensor in the_logits()]
    for indices in MICRO_BATCHES:
        micro = collate([rows[index] for index in indices], torch.device("cpu"))
        logprobs, entropies = logprobs_of(padded(logits, indices), micro)
        reference, _ = logprobs_of(padded(reference_logits(), indices), micro)
        tokens = micro.trained_tokens(*map(micro.of_trained, (logprobs, entropies, reference)))
        loss, _ = weighted_loss(tokens, micro.weights_N, objective, config)
        if micro.observed is not None:
            selected = logprobs[~micro.observed.trained_S]
            loss += (
                config.observation_coef
                * observation_loss(selected, micro.observed.weights_M, micro.observed.warnings_M)[0]
            )
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


def test_a_clip_beside_a_weight_of_the_same_ratio_corrects_twice(
    slimes: dict[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """The figures of docs/objectives.md."""
    norms = {name: round(float(gradient.norm()), 3) for name, (_, gradient) in slimes.items()}
    assert (norms["tis"], norms["grpo"], norms[TWICE]) == (0.22, 0.197, 0.26)
