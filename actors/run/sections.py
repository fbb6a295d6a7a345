"""Sections of a run's configuration that do not belong to one class; `config.RunConfig` composes all sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from headrace.buffer.primitives.sections import Section
from headrace.serve.gateway.capture.session import TrainedPart, with_main


class ModelSection(Section):
    """Section [model] of a recipe."""

    path: Path = Path()
    """Hugging Face directory of the policy: config.json, tokenizer files, and weights in one file or in several with an
    index; relative to the recipe. The embedded engine and the Megatron learner compute dense Qwen3 and Qwen2.5 models.
    Simulated engines need none."""


class SamplingSection(Section):
    """Section [sampling] of a recipe: sampling of training rollouts."""

    temperature: float = Field(default=1.0, gt=0)
    """Temperature of every turn of a training session; overrides the agent's."""
    max_tokens_per_turn: int = Field(default=48, ge=1)
    """Maximum number of tokens in one answer."""
    max_context_tokens: int = Field(default=256, ge=16)
    """Maximum number of tokens in one conversation, prompt and answers together."""
    most_context_tokens: int | None = Field(default=None, ge=16)
    """Most tokens that `max_context_tokens` is derived to be, where model and memory allow them; None for what agents
    of the kind need."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens sampled in one session over all its conversations; None for no limit."""
    train_truncated: bool = True
    """Train turns that were cut off at the end of the context; false masks them as `truncated`."""
    train_cut: bool = False
    """Train turns that were cut off when `rollout.agent_timeout_s` was over; false masks them as `aborted`, and then
    little teaches the policy not to ramble until that time (guide 'The gateway')."""
    train: Annotated[tuple[TrainedPart, ...], AfterValidator(with_main)] = (TrainedPart.MAIN,)
    """Turns to train: `main`, and in addition `side` (calls without tools, beside agents that have tools) and
    `abandoned` (turns that the agent continued without), which are masked otherwise. Agents that do not send the
    policy's turns back need them (guide 'The gateway')."""
    serve_unhonoured: bool = True
    """Serve requests for a forced tool call or JSON freely if no engine has a grammar for them, and count them; false
    refuses them, which ends most agents in their first turn."""


class EvaluationSamplingSection(Section):
    """Section [evaluation.sampling] of a recipe: sampling of evaluation rollouts. Missing keys default to those of
    [sampling], except top_p and top_k, because training never truncates the distribution."""

    temperature: float | None = Field(default=None, ge=0, le=10)
    """Temperature of every turn of an evaluation session; overrides the agent's. 0 is greedy. None uses
    sampling.temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of most likely tokens whose total probability reaches this value;
    1 for all tokens."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from only this many of the most likely tokens; -1 for all."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one answer. None uses sampling.max_tokens_per_turn."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Maximum number of tokens in one conversation, prompt and answers together. None uses
    sampling.max_context_tokens."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens sampled in one session over all its conversations. None uses
    sampling.max_sampled_tokens."""

    @field_validator("top_k")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to sample; set -1 for all tokens")
        return value


class EvaluationSection(Section):
    """Section [evaluation] of a recipe."""

    tasks: int = Field(default=64, ge=1)
    """Number of held-out tasks per evaluation, taken from the start of the held-out file."""
    samples: int = Field(default=4, ge=1)
    """Number of answers sampled per task in the base and the final evaluation."""
    every_steps: int = Field(default=10, ge=0)
    """Number of optimizer updates between two evaluations during training; 0 disables them."""
    samples_on_the_way: int = Field(default=1, ge=1)
    """Number of answers sampled per task in the evaluations during training."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    """Sampling of evaluation rollouts."""


class ServiceSection(Section):
    """Section [service] of a recipe."""

    seed: int = Field(default=0, ge=0)
    """Random seed of task order, sampling and learner."""
    workers: int = Field(default=1, ge=1)
    """Number of rollout workers."""
    stall_s: float = Field(default=0.0, gt=0)
    """Time without any progress after which the run ends with a diagnosis. A learner's stage, an engine's start, a boot
    and a push have timeouts of their own."""
    hang_s: float = Field(default=60.0, gt=0)
    """Time without an answer after which an actor is killed and restarted."""
    min_free_bytes: int = Field(default=64 << 20, ge=0)
    """Free space on the run directory's disk below which the run ends in a resumable state, before a write can fail
    halfway. A run is not started while a disk of it has less."""
    drain_s: float = Field(default=30.0, gt=0)
    """Time limit for an interrupted run to save and stop."""
    object_store_bytes: int = Field(default=128 << 20, ge=80 << 20)
    """Size of Ray's shared-memory store; each trajectory is far smaller than 1 MB."""
