"""slime's training processes: its placement group, its arguments, its `RayTrainGroup`, and their end.

Invariants:
- The ranks end together, see `rank_group`.
- The GPUs are reserved as slime reserves them, one bundle each in the order of nodes and devices, but on nodes of the
  learner only. slime's parser runs in a process that has one of them: Megatron asks for the generation of its GPU.
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
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.runtime.actors.nodes import ROLE_LABEL
from headrace.actors.training.rank_group import RankGroup, end_after
from headrace.policies.errors import LearnerSettingsInvalid, RankFailed
from headrace.policies.learners.slime import arguments, checkout

if TYPE_CHECKING:
    from headrace.actors.training.rollout_engine import RolloutEngine
    from headrace.actors.training.slime_rank import RankState, SlimeRankStep
    from headrace.policies.learners.slime.arguments import SlimeTerms
    from headrace.policies.learners.slime_config import SlimeSection

logger = logging.getLogger(__name__)

WAIT_S: Final = 30.0
"""Interval at which a wait for GPUs is logged."""


class PlacementOwner:
    """Detached Ray actor that creates the placement group of one learner, whose process is on the same node. It ends
    with that process, and Ray then removes the group."""

    def __init__(self, learner_process_id: int) -> None:
        threading.Thread(target=end_after, args=(learner_process_id,), daemon=True).start()

    def reserve(self, gpus: int, label: str | None) -> tuple[Any, list[int], list[str]]:
        """Return the placement of the training processes as slime describes it (group, indices of its bundles by rank,
        ids of their GPUs), as soon as the nodes with the label have room for it."""
        import ray
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        from slime.ray.placement_group import InfoActor, sort_key

        selector = None if label is None else [{ROLE_LABEL: label}] * gpus
        group = placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="PACK", bundle_label_selector=selector)
        ready = group.ready()
        while not ray.wait([ready], timeout=WAIT_S)[0]:
            logger.warning("waiting for %d GPUs and as many CPU cores for the learner, %s", gpus, _where(label))
        asked = [
            InfoActor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(gpus)
        ]
        places = ray.get([actor.get_ip_and_gpu_id.remote() for actor in asked])
        for actor in asked:
            ray.kill(actor)
        order = [index for index, *_ in sorted(((index, *place) for index, place in enumerate(places)), key=sort_key)]
        return group, order, [places[index][1] for index in order]


def parse_here(terms: SlimeTerms, load: Path) -> Namespace:
    """Return slime's arguments. Ray runs it in a process of its own, which has a GPU of the learner."""
    slime, megatron = checkout.find_checkouts(terms.learner.slime)
    checkout.make_importable(slime, megatron)
    return arguments.parse(terms, load=load, slime=slime)


class SlimeGroup(RankGroup):
    """Ranks of slime; see `RankGroup`. `args` are slime's arguments."""

    def __init__(self, terms: SlimeTerms, load: Path) -> None:
        """Reserve the GPUs and start the ranks, which load `load`. Raises LearnerSettingsInvalid if the cluster has too
        few GPUs, slime refuses its arguments or a rank refuses its model, and RankFailed if a process dies."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        super().__init__()
        section = terms.learner.slime
        self._runtime_env = {"env_vars": arguments.environment(section)}
        refuse_too_few(section, terms.node_label)
        owner = ray.remote(PlacementOwner).options(
            num_cpus=0,
            lifetime="detached",
            name=f"slime-gpus-{secrets.token_hex(8)}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            runtime_env=self._runtime_env,
        )
        self._group: Any = None
        self._lock: Any = None
        self._owner = owner.remote(os.getpid())
        self._placement = ray.get(self._owner.reserve.remote(section.gpus, terms.node_label))
        try:
            self.args = self._parse(terms, load)
            self._start()
        except BaseException:
            self.close()
            raise

    def _parse(self, terms: SlimeTerms, load: Path) -> Namespace:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, order, _ = self._placement
        # The process ends with the task (`max_calls`), and with it what it holds of the GPU's memory.
        task = ray.remote(
            num_cpus=1,
            num_gpus=1,
            max_calls=1,
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, order[0]),
            runtime_env=self._runtime_env,
        )(parse_here)
        try:
            parsed: Namespace = ray.get(task.remote(terms, load))
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), LearnerSettingsInvalid):
                raise cause from error
            raise RankFailed(f"the process of slime's parser died: {error}") from error
        return parsed

    def _start(self) -> None:
        """Do what `RayTrainGroup.create` does, but see the first error at once."""
        from ray.exceptions import RayActorError, RayError
        from slime.ray.placement_group import allocate_train_group

        from headrace.actors.training.slime_rank import SlimeRank

        group = self._group = allocate_train_group(
            args=self.args,
            num_nodes=self.args.actor_num_nodes,
            num_gpus_per_node=self.args.actor_num_gpus_per_node,
            pg=self._placement,
            with_ref=self.args.use_kl_loss,
            with_opd_teacher=self.args.use_opd,
            actor_cls=SlimeRank,
        )
        try:
            group._allocate_gpus_for_actor(self._placement, group._num_gpus_per_actor)  # noqa: SLF001 - see `checkout`
        except RayError as error:
            raise RankFailed(f"a training process died while it started: {error}") from error
        self._ranks = group._actor_handlers  # noqa: SLF001 - see `checkout`
        # Known before they load the model, so that `close` can wait for their end at any time.
        self._find_processes()
        models = (group._with_ref, group._with_opd_teacher)  # noqa: SLF001
        initialised = [rank.init.remote(self.args, group.role, *models) for rank in self._ranks]
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

    def connect_engines(self, engines: Sequence[RolloutEngine], gpus: Sequence[int], limit_s: float) -> None:
        """Connect slime's weight updaters with these engines. Raises RankFailed."""
        from slime.ray.utils import Lock

        if self._lock is None:
            # Between the stages of a pipeline, each of which sends to all engines.
            self._lock = Lock.options(num_cpus=0, runtime_env=self._runtime_env).remote()
        self.call_within(limit_s, "connect_engines", engines, self._lock, gpus)

    def close(self) -> None:
        """Kill all ranks and free their GPUs. Idempotent."""
        import ray
        from ray.util import remove_placement_group

        if self._group is not None:
            # A failed start has filled only this list.
            self._ranks = self._group._actor_handlers  # noqa: SLF001 - see `checkout`
            self._group._actor_handlers = []  # noqa: SLF001
        super().close()
        # Ray ends the lock with its last handle; a rank that died may hold it.
        self._lock = None
        if self._placement is not None:
            remove_placement_group(self._placement[0])
            ray.kill(self._owner)
            self._placement = None


def refuse_too_few(section: SlimeSection, label: str | None) -> None:
    """Raise LearnerSettingsInvalid if the nodes with the label have too few GPUs, for which slime would wait without
    end."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"] and label in (None, node["Labels"].get(ROLE_LABEL))]
    present = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
    if sum(count // section.gpus_per_node for count in present) < section.nodes:
        raise LearnerSettingsInvalid(
            f"learner.slime.nodes x gpus_per_node need {section.nodes} x {section.gpus_per_node} GPUs, but the Ray "
            f"cluster has {' + '.join(map(str, present)) or 'none'}, {_where(label)}: add nodes to it, or lower either"
        )


def _where(label: str | None) -> str:
    return "on all of its nodes" if label is None else f"on its nodes with the label {ROLE_LABEL}={label}"
