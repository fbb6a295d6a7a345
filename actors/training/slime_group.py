"""slime's training processes: its placement group, its `RayTrainGroup`, and their end.

Invariants:
- A call ends as soon as one rank has failed, not when the others' collective gives up. Then all ranks are killed: what
  is left of a group after a failure refuses everything.
- `close` frees the GPUs, which slime never does: it kills the ranks and removes the placement group.
- If this process dies, Ray kills the ranks, which it owns. The placement group belongs to a detached actor that watches
  this process and ends with it. Ray removes a group with its detached creator, but keeps one whose creator is restarted
  (as the learner's actor is), or belongs to a job that goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psutil

from headrace.policies.errors import LearnerSettingsInvalid, RankFailed

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from headrace.actors.training.slime_rank import RankState, RankStep

logger = logging.getLogger(__name__)

CHECK_S: Final = 1.0
"""Interval at which a waiting call looks whether the group is being closed."""
END_S: Final = 30.0
"""Time limit for killed ranks of this node to end."""


class PlacementOwner:
    """Detached Ray actor that creates the placement group of one learner, whose process is on the same node. It ends
    with that process, and Ray then removes the group."""

    def __init__(self, learner_process_id: int) -> None:
        threading.Thread(target=_end_after, args=(learner_process_id,), daemon=True).start()

    def reserve(self, args: Namespace) -> Any:
        """Return slime's placement of the training processes, as soon as the cluster has room for it."""
        from slime.ray.placement_group import create_placement_groups

        return create_placement_groups(args)["actor"]


class SlimeGroup:
    """Ranks of one learner incarnation. Its methods block, and are called from one thread; `interrupt` from any."""

    def __init__(self, args: Namespace) -> None:
        """Reserve the GPUs and start the ranks. Raises LearnerSettingsInvalid if the cluster has too few GPUs or a rank
        refuses its model or settings, and RankFailed if a rank dies."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from slime.ray.placement_group import allocate_train_group

        from headrace.actors.training.slime_rank import SlimeRank

        self._args = args
        self._interrupted = threading.Event()
        self._ranks: list[Any] = []
        self._processes: list[psutil.Process] = []
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
        self._processes = _local_processes(self.call("place"))
        initialised = [rank.init.remote(self._args, group.role) for rank in self._ranks]
        try:
            self._answers(initialised)
        except RankFailed as error:
            if isinstance(error.__cause__, RayActorError):
                raise
            raise LearnerSettingsInvalid(f"slime could not load the model: {error}") from error
        self.states: Sequence[RankState] = self.call("state")

    def train(self, number: int, data: Sequence[dict[str, Any]]) -> list[RankStep]:
        """Perform step `number` on the data of each data-parallel rank. Raises RankFailed."""
        import ray
        from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
        from slime.utils.misc import Box

        for part in data:
            tensorize_rollout_data_for_training(part)
        boxes = [Box(ray.put(part)) for part in data]
        self._refuse_closed()
        return self._answers(self._group.async_train(number, boxes))

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every rank, and return the results by rank. Raises RankFailed."""
        self._refuse_closed()
        return self._answers([getattr(rank, method).remote(*arguments) for rank in self._ranks])

    def interrupt(self) -> None:
        """Make a waiting call fail, so that the group can be closed."""
        self._interrupted.set()

    def close(self) -> None:
        """Kill all ranks and free their GPUs. Idempotent."""
        import ray
        from ray.util import remove_placement_group

        ranks = self._group._actor_handlers  # noqa: SLF001 - a failed start has filled only this list
        self._group._actor_handlers = []  # noqa: SLF001
        self._ranks = []
        for rank in ranks:
            ray.kill(rank, no_restart=True)
        _, alive = psutil.wait_procs(self._processes, timeout=END_S)
        if alive:
            logger.error("ranks are still alive after they were killed: %s", [process.pid for process in alive])
        if self._placement is not None:
            remove_placement_group(self._placement[0])
            ray.kill(self._owner)
            self._placement = None

    def _refuse_closed(self) -> None:
        if not self._ranks:
            raise RankFailed("the training processes have ended: open a new learner")

    def _answers(self, references: Sequence[Any]) -> list[Any]:
        """Return the answers by rank. Raises RankFailed for the first failure, after killing all ranks."""
        import ray
        from ray.exceptions import RayError

        answers: list[Any] = [None] * len(references)
        waiting = {reference: rank for rank, reference in enumerate(references)}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=CHECK_S)
            if self._interrupted.is_set():
                raise RankFailed("the learner was closed while its training processes worked")
            for reference in done:
                rank = waiting.pop(reference)
                try:
                    answers[rank] = ray.get(reference)
                except RayError as error:
                    self.close()
                    raise RankFailed(f"rank {rank} of {len(references)} failed: {_reason(error)}") from error
        return answers


def _end_after(process_id: int) -> None:
    """End this process when another one of the same node has ended."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(process_id).wait()
    os._exit(0)


def _reason(error: Exception) -> str:
    """Return the rank's own error on one line, without Ray's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _local_processes(places: Sequence[tuple[str, int]]) -> list[psutil.Process]:
    import ray

    here = ray.get_runtime_context().get_node_id()
    local = [process_id for node, process_id in places if node == here]
    return [psutil.Process(process_id) for process_id in local if psutil.pid_exists(process_id)]
