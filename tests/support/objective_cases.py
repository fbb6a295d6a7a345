"""Batches and settings on which tests of the objectives run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

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
from headrace.policies.learners.logprob_head import trained_logprobs
from headrace.policies.learners.micro_batches import MicroBatch
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.loss import Objective
from headrace.policies.learners.objectives.registry import OBJECTIVES
from headrace.policies.learners.objectives.tokens import TokenLoss, TrainedTokens

VERSION = PolicyVersion(1, 0)

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo without cap": {"correction": "none"},
    "grpo with dual clip": {"correction": "none", "dual_clip": 1.6},
    "grpo with cap and dual clip": {"weight_cap": 1.3, "dual_clip": 1.6},
    "grpo with IcePop": {"correction": "icepop", "weight_floor": 0.7, "weight_cap": 1.5},
    "grpo with truncated weights": {"correction": "tis", "weight_cap": 1.4},
    "grpo with a sequence mask": {"sequence_mask": 0.05},
    "gspo": {"objective": "gspo", "eps_low": 0.03, "eps_high": 0.04},
    "gspo as published": {"objective": "gspo", "correction": "none", "eps_low": 3e-4, "eps_high": 4e-4},
    "gspo without cap": {"objective": "gspo", "correction": "none"},
    "gspo with cap and dual clip": {"objective": "gspo", "weight_cap": 1.02, "dual_clip": 1.05},
    "gspo with IcePop and a sequence mask": {"objective": "gspo", "correction": "icepop", "sequence_mask": 0.02},
    "cispo": {"objective": "cispo"},
    "cispo with an upper bound only": {"objective": "cispo", "correction": "none", "eps_low": 1.0, "eps_high": 0.1},
    "cispo as published": {
        "objective": "cispo",
        "correction": "none",
        "loss_weight": "token",
        "eps_low": 1.0,
        "eps_high": 0.28,
    },
    "cispo with IcePop": {"objective": "cispo", "correction": "icepop"},
    "REINFORCE with weights": {"objective": "reinforce", "correction": "weights", "weight_cap": 1.4},
    "k1": {"kl_coef": 0.3, "kl_kind": "k1"},
    "k2": {"kl_coef": 0.3, "kl_kind": "k2"},
    "k3": {"kl_coef": 0.3, "kl_kind": "k3"},
    "entropy": {"objective": "gspo", "entropy_coef": 0.2},
    "all terms over tokens": {"loss_weight": "token", "kl_coef": 0.1, "entropy_coef": 0.1},
    "a constant": {"loss_weight": "constant", "loss_constant": 12.5, "kl_coef": 0.1},
}
"""Settings of every objective, correction, term and weight."""


def reinforce(tokens: TrainedTokens, config: ObjectiveConfig) -> TokenLoss:
    """-A log p: without the ratio."""
    return TokenLoss(loss_N=-tokens.advantages_N * tokens.logprobs_N, metrics={})


def objective_of(config: ObjectiveConfig) -> Objective:
    """Headrace's own objective, or REINFORCE as that of another package."""
    if config.objective == "reinforce":
        return Objective(loss=reinforce, uses_ratio=False)
    return OBJECTIVES.find(config.objective)()


def logprobs_of(logits_BTV: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the trained tokens, and of the observed ones if those are computed, by the
    learner's head with weights that change nothing."""
    identity_VV = torch.eye(logits_BTV.shape[-1])
    return trained_logprobs(logits_BTV, identity_VV, micro.tokens_BT, micro.scored_BT, micro.temperatures_S)


def make_row(
    tokens: Sequence[int],
    mask: Sequence[bool],
    logprobs: Sequence[float] | None = None,
    kinds: Sequence[int] | None = None,
) -> Row:
    """A row; without `logprobs`, those of sampled tokens are -2."""
    trained = np.array(mask, dtype=np.bool_)
    values = np.full(len(trained), -2.0) if logprobs is None else np.asarray(logprobs)
    return Row(
        tokens_T=np.array(tokens, dtype=np.int32),
        loss_mask_T=trained,
        logprobs_T=np.where(trained, values, 0.0).astype(np.float32),
        versions=tuple(VersionSpan(start=int(at), end=int(at) + 1, version=VERSION) for at in np.flatnonzero(trained)),
        kinds_T=None if kinds is None else np.array(kinds, dtype=np.uint8),
    )


def make_batch(items: Sequence[tuple[float, Sequence[Row]]], *, temperature: float = 1.0) -> Batch:
    """A batch of trajectories, given as advantages and rows."""
    members = tuple(
        BatchItem(
            rollout_id=RolloutId(f"r{index}"),
            group_id=GroupId("g"),
            attempt=1,
            reward=1.0,
            advantage=advantage,
            staleness=0,
            trajectory=Trajectory(rows=tuple(rows), temperature=temperature),
        )
        for index, (advantage, rows) in enumerate(items)
    )
    return Batch(lease=BatchLease(batch_id=BatchId("b"), epoch=1), version=VERSION, items=members)


def random_tokens(seed: int, *, rows: int = 9, trajectories: int = 5) -> TrainedTokens:
    """Tokens in float64 whose ratios lie on both sides of every bound in SETTINGS, in shuffled order; one trajectory in
    five has advantage 0."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 12, size=rows)
    row_of = generator.permutation(np.repeat(np.arange(rows), lengths))
    advantages = generator.normal(size=trajectories)
    advantages[-1] = 0.0
    trajectory_of = (np.arange(rows) % trajectories)[row_of]
    behaviour = generator.normal(-2.0, 0.5, size=len(row_of))
    drift = generator.normal(0.0, 0.1, size=rows)[row_of] + generator.normal(0.0, 0.35, size=len(row_of))
    values = {
        "logprobs_N": behaviour + drift,
        "entropies_N": generator.uniform(0.1, 2.0, size=len(row_of)),
        "behaviour_logprobs_N": behaviour,
        # Some are so far away that k3 is clamped.
        "reference_logprobs_N": behaviour + generator.normal(0.0, 2.0, size=len(row_of)),
        "advantages_N": advantages[trajectory_of],
        "rows_N": row_of,
        "trajectories_N": trajectory_of,
    }
    tensors = {name: torch.from_numpy(array) for name, array in values.items()}
    for name in ("logprobs_N", "entropies_N"):
        tensors[name].requires_grad_()
    return TrainedTokens(**tensors)
