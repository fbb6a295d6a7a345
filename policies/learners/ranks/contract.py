"""Interface between the Megatron trainer and its ranks, one or several. Needs no torch.

Invariants:
- All ranks get the whole batch. Weights in the loss are fixed for all of it before its rows are distributed, so the
  number of ranks changes a step only by rounding.
- A step's loss, metrics and log-probability drift are sums over the ranks. Its gradient is summed among them, so all
  ranks have the same norm, and scale and skip alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from headrace.buffer.trajectories.types import Batch, CheckpointRef
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.logprob_drift import DriftSums
from headrace.policies.learners.objectives.token_sums import ObservationSums, TokenSums

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """Part of a step that one rank computed. `grad_norm` is that of the gradient of the whole batch, before it was
    scaled down. `observed` is None if observed tokens were not computed."""

    loss: float
    grad_norm: float
    sums: TokenSums
    drift: DriftSums
    observed: ObservationSums | None = None
    critic: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the critic, which a learner with several ranks does not have."""


class Ranks(Protocol):
    """All ranks of one learner incarnation. The methods block, and are called from one thread; `interrupt` from any.

    With several ranks, all raise RankFailed when one of them fails; then all have ended."""

    def step(self, batch: Batch, learning_rate: float) -> list[RankStep]:
        """Perform one update, unless the gradient is not finite, and return the part of each rank."""

    def export(self, path: Path, version: PolicyVersion) -> None:
        """Write the weights with Hugging Face names into a safetensors file. Raises OSError."""

    def check_agreement(self) -> None:
        """Raise RankFailed if the ranks' weights or optimizer states differ."""

    def save_state(self, directory: Path) -> None:
        """Write weights, optimizer and random states into the empty `directory`. Raises OSError."""

    def interrupt(self) -> None:
        """Make a waiting call fail, so that `close` need not wait for it."""

    def close(self) -> None:
        """End the ranks. Idempotent."""


StartRanks: TypeAlias = "Callable[[LearnerConfig, CheckpointRef | None], Ranks]"


def whole_step(parts: Sequence[RankStep]) -> RankStep:
    """Return the step of all ranks together."""
    observed = [part.observed for part in parts if part.observed is not None]
    return RankStep(
        loss=sum(part.loss for part in parts),
        grad_norm=parts[0].grad_norm,
        sums=sum((part.sums for part in parts), TokenSums()),
        drift=sum((part.drift for part in parts), DriftSums()),
        observed=sum(observed, ObservationSums()) if observed else None,
        critic=parts[0].critic,
    )
