"""slime's training processes: its placement group, its `RayTrainGroup`, and their end.

Invariants:
- The ranks end together, see `rank_group`.
- `close` frees the GPUs, which slime never does: it kills the ranks and removes the placement group.
- If this process dies, Ray kills the ranks, which it owns. The placement group belongs to a detached actor that watches
  this process and ends with it. Ray removes a group with its detached creator, but keeps one whose creator is restarted
  (as the learner's actor is), or belongs to a job that goes on.
"""

from __future__ import annotations

import os
import secrets
import threading
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.actors.training.rank_group import RankGroup, end_after
from headrace.policies.errors import LearnerSettingsInvalid, RankFailed

if TYPE_CHECKING:
    from headrace.actors.training.slime_rank import RankState, SlimeRankStep


class PlacementOwner:
    """Detached Ray actor that creates the placement group of one learner, whose process is on the same node. It ends
    with that process, and Ray then removes the group."""

    def __init__(self, learner_process_id: int) -> None:
        threading.Thread(target=end_after, args=(learner_process_id,), daemon=True).start()

    def reserve(self, args: Namespace) -> Any:
        """Return slime's placement of the training processes, as soon as the cluster has room for it."""
        from slime.ray.placement_group import create_placement_groups

        return create_placement_groups(args)["actor"]


class SlimeGroup(RankGroup):
    """Ranks of slime; see `RankGroup`."""

    def __init__(self, args: Namespace) -> None:
        """Reserve the GPUs and start the ranks. Raises LearnerSettingsInvalid if the cluster has too few GPUs or a rank
        refuses its model or settings, and RankFailed if a rank dies."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from slime.ray.placement_group import allocate_train_group

        from headrace.actors.training.slime_rank import SlimeRank

        super().__init__()
        self._args = args
        wanted, present = args.actor_num_nodes * args.actor_num_gpus_per_node, ray.cluster_resources().get("GPU", 0)
        if present < wanted:
            # slime would wait for them without end.
            raise LearnerSettingsInvalid(
                f"learner.slime.nodes x gpus_per_node need {wanted} GPUs, but the Ray cluster has {present:g}: add "
                "nodes to it, or lower either"
            )
        owner = ray.remote(PlacementOwner).options(
            num_cpus=0,
            lifetime="detached",
            name=f"slime-gpus-{secrets.token_hex(8)}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            runtime_env={"env_vars": args.train_env_vars},
        )
        self._owner = owner.remote(os.getpid())
        self._placement = ray.get(self._owner.reserve.remote(args))
        self._group = allocate_train_group(
            args=args,
            num_nodes=args.actor_num_nodes,
            num_gpus_per_node=args.actor_num_gpus_per_node,
            pg=self._placement,
            actor_cls=SlimeRank,
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Do what `RayTrainGroup.create` does, but see the first error at once."""
        from ray.exceptions import RayActorError, RayError

        group = self._group
        try:
            group._allocate_gpus_for_actor(self._placement, group._num_gpus_per_actor)  # noqa: SLF001 - see `checkout`
        except RayError as error:
            raise RankFailed(f"a training process died while it started: {error}") from error
        self._ranks = group._actor_handlers  # noqa: SLF001 - see `checkout`
        # Known before they load the model, so that `close` can wait for their end at any time.
        self._find_processes()
        initialised = [rank.init.remote(self._args, group.role) for rank in self._ranks]
        try:
            self._answers(initialised)
        except RankFailed as error:
            if isinstance(error.__cause__, RayActorError):
                raise
            raise LearnerSettingsInvalid(f"slime could not load the model: {error}") from error
        self.states: Sequence[RankState] = self.call("state")

    def train(self, number: int, data: Sequence[dict[str, Any]]) -> list[SlimeRankStep]:
        """Perform step `number` on the data of each data-parallel rank. Raises RankFailed."""
        import ray
        from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
        from slime.utils.misc import Box

        for part in data:
            tensorize_rollout_data_for_training(part)
        boxes = [Box(ray.put(part)) for part in data]
        self._refuse_closed()
        return self._answers(self._group.async_train(number, boxes))

    def close(self) -> None:
        """Kill all ranks and free their GPUs. Idempotent."""
        import ray
        from ray.util import remove_placement_group

        # A failed start has filled only this list.
        self._ranks = self._group._actor_handlers  # noqa: SLF001 - see `checkout`
        self._group._actor_handlers = []  # noqa: SLF001
        super().close()
        if self._placement is not None:
            remove_placement_group(self._placement[0])
            ray.kill(self._owner)
            self._placement = None
