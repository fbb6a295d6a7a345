"""Configuration of the learners."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.policies.learners.checkpoints import OBJECTIVE, trained_model
from headrace.policies.learners.objectives.config import PPO, ObjectiveConfig
from headrace.policies.learners.objectives.critic import CriticSection
from headrace.policies.learners.simulated import SimulatedLearnerConfig
from headrace.policies.learners.slime_config import SlimeSection
from headrace.policies.tokens.model_keys import read_vocabulary_size

DecayRate = Annotated[float, Field(ge=0, lt=1)]
_SIZES_OF_SLIME: Final = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


class LearnerConfig(ObjectiveConfig):
    """Settings of `MegatronLearner`. Defaults suit policies of a few hundred thousand parameters; a recipe derives its
    own."""

    model_dir: Path
    """Hugging Face directory of the starting policy, a dense Qwen3 or Qwen2.5 model: config.json, weights in one or
    several files, tokenizer files."""
    checkpoint_dir: Path
    """Directory for checkpoints, `<epoch>.<step>/`; used by this learner only."""
    snapshot_dir: Path
    """Directory for snapshots of the weights; the last two are kept."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """AdamW's learning rate, constant after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of updates over which the learning rate rises linearly."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay of matrices; norms and biases do not decay."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient; a larger one is scaled down."""
    token_budget: int = Field(default=16384, gt=0)
    """Maximum number of padded tokens (rows x longest row) in a micro-batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the model's parameters and activations. With `bfloat16`, the optimizer keeps fp32 main weights, and
    engines and checkpoints get the rounded ones."""
    recompute: bool = False
    """Keep only the input of each layer, and compute its activations again in the backward pass: a third more time for
    far less memory at long rows."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Number of processes that train, each with the whole model and a part of every batch. One trains in the learner's
    own process. Results depend on it by rounding."""
    rank_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Time for which a rank waits for the others in a step, a save or an opening, and the learner for the others after
    the first has answered. A rank that takes longer is considered hung, and all are killed. Raise it if ranks have
    very uneven work."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads of each rank's torch. Results depend on it by rounding."""
    max_skipped_in_a_row: int = Field(default=3, gt=0)
    """Number of consecutive steps with a non-finite gradient after which the run ends."""
    mismatch_alarm: float = Field(default=0.05, gt=0)
    """Mean absolute difference, in nats, between the log-probabilities of learner and engines over tokens that the
    trained version sampled itself, above which a step raises an alarm. The same weights give about 1e-6 in fp32, and
    several 1e-3 in bf16; a larger difference means that engine and learner do not compute the same policy."""
    keep_checkpoints: int = Field(default=3, gt=0)
    """Number of newest checkpoints to keep, beside the best one by held-out success."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the learner. `cuda` reserves one GPU for each rank with Ray, which no engine of the run then uses."""
    seed: int = 0
    """Random seed of torch and Megatron. The model has no dropout, so steps do not depend on it."""
    kind: Literal["megatron", "slime", "external", "simulated"] = "megatron"
    """Kind of learner. `slime` trains with slime's processes on the GPUs of `learner.slime`. `external` is a trainer of
    yours, which takes its batches over the control API of a cluster; of the keys above it needs `token_budget` and
    `keep_checkpoints`. `simulated` lets time pass instead of computing, and ignores the keys above."""
    critic: CriticSection = CriticSection()
    """Settings of the critic of the objective `ppo`."""
    slime: SlimeSection = SlimeSection()
    """Settings of the slime learner."""
    simulated: SimulatedLearnerConfig = SimulatedLearnerConfig()
    """Settings of the simulated learner."""

    @model_validator(mode="before")
    @classmethod
    def _sizes_of_slime_are_not_ours(cls, keys: Any) -> Any:
        for name in _SIZES_OF_SLIME:
            if isinstance(keys, Mapping) and name in keys:
                raise ValueError(
                    f"{name} belongs to slime, because each of the megatron learner's ranks has the whole model: set "
                    f"learner.kind to slime and learner.slime.{name}, or remove it"
                )
        return keys

    @model_validator(mode="before")
    @classmethod
    def _slime_is_passed_no_correction(cls, keys: Any) -> Any:
        return {"correction": "none", **keys} if isinstance(keys, Mapping) and keys.get("kind") == "slime" else keys

    @model_validator(mode="after")
    def _ranks_are_megatron_s(self) -> Self:
        if self.ranks > 1 and self.kind == "slime":
            raise ValueError(
                f"ranks {self.ranks} has no effect with kind slime, which has a rank per GPU of learner.slime.nodes "
                "x gpus_per_node; remove learner.ranks"
            )
        return self

    @model_validator(mode="after")
    def _critic_goes_with_ppo(self) -> Self:
        if self.objective != PPO and self.critic != CriticSection():
            raise ValueError(
                f"learner.critic has no effect with objective {self.objective}; remove it or set learner.objective to "
                f"{PPO}"
            )
        if self.objective == PPO and self.kind == "megatron" and self.ranks > 1:
            raise ValueError(
                f"objective {PPO} trains its critic in one rank, but ranks is {self.ranks}: set learner.ranks to 1, or "
                "learner.objective to grpo"
            )
        return self

    @property
    def gpus(self) -> int:
        """Number of GPUs that the learner's own process reserves; several ranks reserve theirs."""
        return self._rank_gpus if self.ranks == 1 else 0

    @property
    def reserved_gpus(self) -> dict[str, int]:
        """Number of GPUs that the learner and its training processes reserve, by the keys that decide it."""
        if self.kind == "slime":
            nodes, each = self.slime.nodes, self.slime.gpus_per_node
            return {f"learner.slime.nodes {nodes} x learner.slime.gpus_per_node {each}": nodes * each}
        several = f" x learner.ranks {self.ranks}" if self.ranks > 1 else ""
        return {f"learner.device = cuda{several}": self._rank_gpus}

    @property
    def _rank_gpus(self) -> int:
        return self.ranks if self.kind == "megatron" and self.device == "cuda" else 0


def row_limits(config: LearnerConfig) -> RowLimits | None:
    """Return the limits on the rows that this learner can train; None for a simulated learner, which has none. Raises
    ModelInvalid."""
    if config.kind == "simulated":
        return None
    return RowLimits(vocabulary=read_vocabulary_size(config.model_dir), tokens=config.token_budget)


def trained_as(config: LearnerConfig) -> dict[str, str | int]:
    """Return what this learner trains, as its checkpoints record it; empty for a simulated learner. Entries of the
    model are missing if its directory no longer exists."""
    if config.kind == "simulated":
        return {}
    return trained_model(config.model_dir) | {OBJECTIVE: config.objective}
