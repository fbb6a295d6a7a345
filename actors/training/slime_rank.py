"""One training process of slime, as slime's `RayTrainGroup` starts it through its parameter `actor_cls`.

Importing this module imports slime and Megatron, so only the slime learner's processes do it. slime's methods return
nothing and write where its arguments say; this subclass returns what they logged, and names the folders.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch.distributed as dist
from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.observability import logging_utils
from slime.utils import accelerator
from slime.utils.distributed_utils import get_gloo_group

from headrace.policies.learners.logprob_drift import DriftSums
from headrace.policies.learners.slime import adam, token_terms, visibility
from headrace.policies.processes.parent_death import die_with_parent

if TYPE_CHECKING:
    from headrace.actors.training.rollout_engine import RolloutEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """State of a rank that has loaded its model. `parallel` is slime's description of the layout, for its schedule.
    `scheduled` counts rollouts that the learning rate's scheduler has seen, `optimizer_steps` the updates of Adam's
    moments."""

    rank: int
    parallel: dict[str, int]
    scheduled: int
    optimizer_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeRankStep:
    """Result of a step on a rank: the numbers that slime logged there, the learning rate of the update,
    `RankState.scheduled` after it, and the comparison of this rank's log-probabilities with the engines'."""

    metrics: dict[str, float]
    learning_rate: float
    scheduled: int
    drift: DriftSums


class SlimeRank(MegatronTrainRayActor):  # type: ignore[misc]
    """Ray actor of one rank. slime constructs and initialises it."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        _end_forks_with_this_process()
        self._logged: dict[str, float] = {}
        log = logging_utils.log

        def record(args: Any, metrics: dict[str, Any], step_key: str) -> None:
            self._logged |= {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
            log(args, metrics, step_key)

        self._compared: list[Any] = []
        capture = loss._maybe_capture_log_probs  # noqa: SLF001 - see `checkout`

        def compare(batch: dict[str, Any], logprobs: list[Any]) -> None:
            # A loss that is computed again for its gradient (--recompute-loss-function) has the same batch.
            if not batch.setdefault("compared", False):
                batch["compared"] = True
                self._compared.append(token_terms.compared(batch, logprobs))
            capture(batch, logprobs)

        # slime's modules call both through the module's attribute.
        logging_utils.log, loss._maybe_capture_log_probs = record, compare  # noqa: SLF001
        adam.use()
        start: int | None = super().init(args, role, with_ref=with_ref, with_opd_teacher=with_opd_teacher)
        # slime collects garbage several times a step, each time over all that torch, Ray and Megatron have imported.
        gc.collect()
        gc.freeze()
        return start

    def place(self) -> tuple[str, int]:
        """Return the id of the rank's node, and its process id there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def state(self) -> RankState:
        steps = {int(group.get("step", 0)) for group in self.optimizer.param_groups}
        return RankState(
            rank=self._rank,
            parallel=self.train_parallel_config,
            scheduled=int(self.opt_param_scheduler.num_steps),
            optimizer_steps=max(steps, default=0),
        )

    def train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> SlimeRankStep:
        self._logged, self._compared = {}, []
        # slime logs the rate of the next update.
        rate = float(self.optimizer.param_groups[0]["lr"])
        super().train(rollout_id, rollout_data_ref, external_data=external_data)
        return SlimeRankStep(
            metrics=self._logged,
            learning_rate=rate,
            scheduled=int(self.opt_param_scheduler.num_steps),
            drift=token_terms.drift_sums(self._compared),
        )

    def _get_rollout_data(self, rollout_data_ref: Any) -> Any:
        return token_terms.take_arrays(super()._get_rollout_data(rollout_data_ref), accelerator.current_device())

    def connect_engines(self, engines: Sequence[RolloutEngine], lock: Any, gpus: Sequence[int]) -> None:
        """Form slime's process groups with these engines, together with all other ranks; `gpus` are those of each."""
        self.weight_updater.connect_rollout_engines(engines, lock, engine_gpu_counts=gpus)
        dist.barrier(group=get_gloo_group())

    def update_weights_of_engines(self) -> int:
        """Run slime's updater, together with all other ranks, and return the version that it counts."""
        self.weight_updater.update_weights()
        return int(self.weight_updater.weight_version)

    def begin_deltas(self, number: int) -> None:
        """Take the start model as the version `number`, from which deltas begin, together with all other ranks."""
        self.connect_engines((), None, ())
        # slime's first update only keeps the base.
        self.weight_updater.update_weights()
        self.weight_updater.weight_version = number

    def export(self, directory: str) -> None:
        """Write the model as a Hugging Face directory, together with all other ranks; one rank of each node writes."""
        save_hf_model_to_path(
            self.args,
            directory,
            self.model,
            model_name=self.weight_updater.model_name,
            quantization_config=self.weight_updater.quantization_config,
        )

    def save_into(self, directory: str, iteration: int) -> None:
        """Write slime's torch_dist checkpoint into this directory, together with all other ranks."""
        self.args.save = directory
        self.save_model(iteration, force_sync=True)

    def digests(self, directory: str, names: tuple[str, ...]) -> dict[str, str]:
        """Return the SHA-256 of this rank's share of the files."""
        found = {}
        for name in names[self._rank :: self._world_size]:
            with Path(directory, name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return found

    def leave_token(self, folder: str, token: str) -> None:
        """See `visibility.leave_token`."""
        visibility.leave_token(Path(folder), f"rank-{self._rank}", token)

    def unseen(self, folder: str, token: str) -> tuple[str, ...]:
        """Return the ranks whose tokens this one does not see."""
        names = [f"rank-{rank}" for rank in range(self._world_size)]
        return tuple(visibility.unseen(Path(folder), names, token))


def _end_forks_with_this_process() -> None:
    """Make the kernel kill the children that this process forks when it dies.

    Megatron forks the writers of a checkpoint. They inherit the rank's connections, so while one of them lives, neither
    the other ranks nor Ray notice that the rank has died."""
    parent = os.getpid()

    def before() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_child() -> None:
        try:
            die_with_parent(parent)
        except SystemExit:
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)
