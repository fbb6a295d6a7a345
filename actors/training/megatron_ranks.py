"""Ranks of the Megatron learner as Ray actors on the learner's node.

Invariants:
- The learner's process has no model, and does not import torch: rank 0 writes weights, and all ranks the checkpoint.
- Ranks end with the learner's process, which they watch, even if Ray does not notice its death.
- Each rank reserves a GPU of its own if the learner trains on cuda.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.actors.training.rank_group import RankGroup, end_after
from headrace.buffer.trajectories.types import Batch, CheckpointRef
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import LearnerError, ModelInvalid, RankFailed
from headrace.policies.learners.ranks.contract import RankStep

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.learners.ranks.rank import MegatronRank


class MegatronRankActor:
    """Ray actor of one rank. It ends after the process that started it."""

    def __init__(self, rank: int, config: LearnerConfig, learner_process_id: int) -> None:
        self._number, self._config = rank, config
        threading.Thread(target=end_after, args=(learner_process_id,), daemon=True).start()

    def place(self) -> tuple[str, int]:
        """Return the id of the rank's node, and its process id there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def prepare(self) -> int:
        """Import what the rank needs, which takes seconds, and open the store of rank 0. Return its port; 0 on other
        ranks. Raises GroupFailed."""
        from headrace.policies.learners.ranks import rank  # noqa: F401
        from headrace.policies.push.process_group import host_store

        if self._number:
            return 0
        self._store = host_store("127.0.0.1", self._config.ranks, self._config.rank_timeout_s)
        return self._store.port

    def open(self, port: int, resume: CheckpointRef | None) -> None:
        """Load the model or the checkpoint, together with all other ranks. Raises as `MegatronRank`, and
        GroupFailed."""
        from headrace.policies.learners.megatron_world import World
        from headrace.policies.learners.ranks.rank import MegatronRank
        from headrace.policies.push.process_group import join_store

        size, timeout_s = self._config.ranks, self._config.rank_timeout_s
        store = join_store("127.0.0.1", port, size, timeout_s) if self._number else self._store
        world = World(rank=self._number, size=size, store=store, timeout_s=timeout_s)
        self._rank: MegatronRank = MegatronRank(self._config, resume, world)

    def step(self, batch: Batch, learning_rate: float) -> RankStep:
        """See `MegatronRank.step`."""
        return self._rank.step(batch, learning_rate)

    def export(self, path: Path, version: PolicyVersion) -> None:
        """See `MegatronRank.export`."""
        self._rank.export(path, version)

    def digest(self) -> str:
        """See `MegatronRank.digest`."""
        return self._rank.digest()

    def save_state(self, directory: Path) -> None:
        """See `MegatronRank.save_state`."""
        self._rank.save_state(directory)


class MegatronRanks(RankGroup):
    """All ranks of one learner incarnation; see `Ranks` and `RankGroup`."""

    passed_on = (LearnerError, ModelInvalid, OSError)

    def __init__(self, config: LearnerConfig, resume: CheckpointRef | None) -> None:
        """Start the ranks, and load the model or the checkpoint. Raises as `MegatronRank`, and RankFailed."""
        import ray
        from ray.util import get_current_placement_group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        super().__init__()
        group = get_current_placement_group()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(MegatronRankActor).options(
            num_cpus=0,
            num_gpus=int(config.device == "cuda"),
            max_restarts=0,
            # On a cluster the learner's bundle has reserved the GPUs of all ranks.
            scheduling_strategy=here if group is None else PlacementGroupSchedulingStrategy(group),
        )
        self._ranks = [actor.remote(rank, config, os.getpid()) for rank in range(config.ranks)]
        try:
            self._find_processes()
            port, *_ = self.call("prepare")
            # Not before: on a busy host, the processes of two ranks may start at very different times.
            self.lag_s = config.rank_timeout_s
            self.call("open", port, resume)
        except BaseException:
            self.close()
            raise

    def step(self, batch: Batch, learning_rate: float) -> list[RankStep]:
        """See `Ranks.step`."""
        import ray

        steps = self.call("step", ray.put(batch), learning_rate)
        # As text, in which two NaNs are equal.
        self._require_same("gradients, with the norms", [repr(step.grad_norm) for step in steps])
        return steps

    def export(self, path: Path, version: PolicyVersion) -> None:
        """See `Ranks.export`."""
        self.call_first("export", path, version)

    def check_agreement(self) -> None:
        """See `Ranks.check_agreement`."""
        self._require_same("weights or moments, with the SHA-256", self.call("digest"))

    def save_state(self, directory: Path) -> None:
        """See `Ranks.save_state`."""
        self.call("save_state", directory)

    def _require_same(self, what: str, values: Sequence[str]) -> None:
        """Kill all ranks and raise RankFailed if their values differ."""
        if len(set(values)) == 1:
            return
        self.close()
        of_ranks = "; ".join(
            f"{value} on rank {', '.join(str(rank) for rank, other in enumerate(values) if other == value)}"
            for value in dict.fromkeys(values)
        )
        raise RankFailed(f"the ranks have different {what} {of_ranks}")
