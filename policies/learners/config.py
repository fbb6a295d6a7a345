"""Settings of the learners."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.learners.simulated import SimulatedLearnerConfig


class LearnerConfig(BaseModel):
    """Settings of `MegatronLearner`. The defaults are those of the quickstart's 333k-parameter policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path
    """Hugging Face directory of the start policy: config.json (Qwen3), model.safetensors, tokenizer files."""
    checkpoint_dir: Path
    """Where `<epoch>.<step>/` directories are written; belongs to this learner."""
    snapshot_dir: Path
    """Where weights for the sender are written; holds the last two."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """AdamW's, constant after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient."""
    eps_low: float = Field(default=0.2, gt=0, le=1)
    """A token with negative advantage stops training once current / behaviour is below 1 - eps_low."""
    eps_high: float = Field(default=0.28, gt=0)
    """A token with positive advantage stops training once current / behaviour is above 1 + eps_high."""
    weight_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight of a token."""
    token_budget: int = Field(default=16384, gt=0)
    """Most padded tokens (rows x longest row) of a micro-batch."""
    max_skipped_in_a_row: int = Field(default=3, gt=0)
    """Steps in a row with a non-finite gradient that end the run."""
    keep_checkpoints: int = Field(default=3, gt=0)
    """Newest checkpoints that are kept."""
    seed: int = 0
    """Of torch and Megatron. The model has no dropout, so steps do not depend on it."""
    kind: Literal["megatron", "simulated"] = "megatron"
    """`simulated` takes time instead of computing; of the keys above it knows none."""
    simulated: SimulatedLearnerConfig = SimulatedLearnerConfig()
    """Settings of the simulated learner."""
