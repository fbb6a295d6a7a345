"""The sections of a run's configuration that are no part's own. `config.RunConfig` has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from headrace.actors.runtime.operations import DEFAULT_ABSENT_S
from headrace.actors.section import Section


class ModelSection(Section):
    path: Path = Path()
    """Hugging Face directory of the policy (config.json, model.safetensors, tokenizer.json); relative to the recipe.
    Simulated engines need none."""


class TasksSection(Section):
    train: Path | None = None
    """JSONL of training tasks (docs/tasks.md), relative to the recipe; None generates terminal tasks."""
    heldout: Path | None = None
    """JSONL of held-out tasks; must be given exactly when `train` is."""
    train_count: int = Field(default=512, ge=1)
    """Generated training tasks."""
    heldout_count: int = Field(default=64, ge=1)
    """Generated held-out tasks."""
    evaluate_s: float = Field(default=0.0, ge=0)
    """Time of evaluating a rollout of a generated task for the simulated agent."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.train is None) != (self.heldout is None):
            raise ValueError("tasks.train and tasks.heldout go together: set both files or neither")
        return self


class SamplingSection(Section):
    temperature: float = Field(default=1.0, gt=0)
    """Law for every turn of a training session, whatever the agent asks for."""
    max_tokens_per_turn: int = Field(default=48, ge=1)
    """Tokens one answer may have."""
    max_context_tokens: int = Field(default=256, ge=16)
    """Prompt and answers of one conversation together."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled in one session, all its conversations together; None for no limit."""
    train_truncated: bool = True
    """Whether turns that the end of the context cut are trained; false masks them as `truncated`."""


class EvaluationSamplingSection(Section):
    """Sampling of evaluation rollouts. Keys that are left out are those of [sampling], but top_p and top_k: training
    never cuts the distribution."""

    temperature: float | None = Field(default=None, ge=0, le=10)
    """For every turn of an evaluation session, whatever the agent asks for; 0 takes the likeliest token. None:
    sampling.temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens with this share of the probability together; 1 for all."""
    top_k: int = Field(default=-1, ge=-1)
    """Only so many of the likeliest tokens; -1 for all."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """Tokens one answer may have. None: sampling.max_tokens_per_turn."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Prompt and answers of one conversation together. None: sampling.max_context_tokens."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled in one session, all its conversations together. None: sampling.max_sampled_tokens."""

    @field_validator("top_k")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to sample; set -1 for all tokens")
        return value


class EvaluationSection(Section):
    tasks: int = Field(default=64, ge=1)
    """Held-out tasks per evaluation (the first of the held-out file)."""
    samples: int = Field(default=4, ge=1)
    """Sampled answers per task for the base and the final evaluation."""
    every_steps: int = Field(default=10, ge=0)
    """Optimizer updates between evaluations on the way; 0 for none."""
    samples_on_the_way: int = Field(default=1, ge=1)
    """Sampled answers per task of those."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    """How evaluation rollouts are sampled."""


class ServiceSection(Section):
    seed: int = Field(default=0, ge=0)
    """Of task order, sampling and learner."""
    workers: int = Field(default=1, ge=1)
    """Rollout workers."""
    stall_s: float = Field(default=0.0, gt=0)
    """No progress anywhere for so long ends the run with a diagnosis. A learner's stage, an engine's start, a boot and
    a push have clocks of their own."""
    hang_s: float = Field(default=60.0, gt=0)
    """An actor that does not answer for so long is killed and started again."""
    min_free_bytes: int = Field(default=64 << 20, ge=0)
    """Less room than this on the disk of the run directory ends the run, resumable, before writes fail half-way."""
    drain_s: float = Field(default=30.0, gt=0)
    """How long an interrupted run may take to save and close."""
    object_store_bytes: int = Field(default=128 << 20, ge=80 << 20)
    """Ray's shared-memory store; trajectories are far below 1 MB each."""


class ClusterSection(Section):
    absent_s: float = Field(default=DEFAULT_ABSENT_S, gt=0)
    """How long an actor may be away (its process or its host died) while everything else goes on; then the run ends,
    and may be resumed (exit code 75)."""
