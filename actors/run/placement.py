"""Config section `cluster`: the Ray cluster of a run, its folders, and where on its nodes the actors run.

Invariants:
- On a local Ray nothing is reserved but GPUs, and all actors share one node.
- On a cluster the actors of the run's state are bound to the one node with the role `control`. A rollout unit (gateway,
  evaluator, workers) and the learner with its ranks have a bundle each, which moves as a whole when its node is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from headrace.actors.errors import ConfigError
from headrace.actors.runtime.actors.nodes import Bundle, NodeRole
from headrace.actors.runtime.actors.operations import DEFAULT_ABSENT_S
from headrace.actors.runtime.actors.runtime import PLAIN, Resources
from headrace.buffer.primitives.sections import Section

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig

LOCAL: Final = "local"
CONTROL_CPUS: Final = 0.1
CONTROL_MEMORY_BYTES: Final = 256 << 20
"""Reserved for each actor of the control node. Measured: 50 to 150 MB."""
LEARNER_BUNDLE: Final = "learner"


class RolesSection(Section):
    """Values of the nodes' label `headrace/role`. Give two roles the same value to share nodes."""

    control: str = "control"
    """The node with the runs' state; exactly one."""
    rollout: str = "rollout"
    """Nodes of workers, evaluators and gateways."""
    engine: str = "engine"
    """Nodes of inference engines."""
    learner: str = "learner"
    """Nodes of the learner."""

    def labels(self) -> dict[NodeRole, str]:
        return {role: getattr(self, role.value) for role in NodeRole}


class ClusterSection(Section):
    """Section [cluster] of a recipe."""

    address: str = LOCAL
    """`local` starts a Ray that ends with the command. `HOST:PORT` of the head, or `auto` for the cluster of this node,
    submits the run to a cluster, where it needs no further process (guide 'Runs on a cluster')."""
    state: Path | None = None
    """On a cluster: folder on the control node's local disk for the ledgers of all runs. Other nodes use the same path
    on their own disks for files that may be lost."""
    storage: Path | None = None
    """On a cluster: folder that all nodes see, for configuration, tasks, checkpoints, weights and evaluations."""
    roles: RolesSection = RolesSection()
    """Labels of the nodes."""
    rollout_units: int = Field(default=1, ge=1)
    """Number of rollout units (a gateway, an evaluator and `service.workers` workers each). On a cluster, by default as
    many as there are rollout nodes when the run is submitted."""
    unit_cpus: float = Field(default=1.0, gt=0)
    """CPU cores that a rollout unit reserves on a cluster."""
    unit_memory_bytes: int = Field(default=1 << 30, ge=0)
    """Memory that a rollout unit reserves on a cluster."""
    learner_cpus: float = Field(default=1.0, gt=0)
    """CPU cores that the learner reserves on a cluster, with all of its ranks."""
    learner_memory_bytes: int = Field(default=1 << 30, ge=0)
    """Memory that the learner reserves on a cluster, with all of its ranks."""
    restarts: int = Field(default=20, ge=0)
    """On a cluster: number of times that the run is started again after a transient failure (exit code 75)."""
    absent_s: float = Field(default=DEFAULT_ABSENT_S, gt=0)
    """Time that an actor may be down (its process or host died) while the rest of the run continues; after that, the
    run ends with exit code 75 and can be resumed."""

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if address not in (LOCAL, "auto") and not (host and port.isdigit()):
            raise ValueError('write "local", "auto" or "HOST:PORT"')
        return address

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.is_local:
            if self.rollout_units != 1:
                raise ValueError("rollout_units needs a cluster: raise service.workers instead")
            return self
        for key in ("state", "storage"):
            folder = getattr(self, key)
            if folder is None or not folder.is_absolute():
                raise ValueError(f"{key} is missing or relative: a run on a cluster needs an absolute path")
        if self.state == self.storage:
            raise ValueError("state and storage are the same folder: state must be on a local disk")
        return self

    @property
    def is_local(self) -> bool:
        return self.address == LOCAL

    def labels(self) -> dict[NodeRole, str] | None:
        """Return the label of each role's nodes; None on a local Ray."""
        return None if self.is_local else self.roles.labels()

    def on(self, role: NodeRole) -> Resources:
        """Return the resources of an actor that mostly waits for others, on a node with this role."""
        if self.is_local:
            return PLAIN
        return Resources(cpus=CONTROL_CPUS, memory_bytes=CONTROL_MEMORY_BYTES, role=role)

    def units(self) -> list[Unit]:
        return [Unit(number=number) for number in range(self.rollout_units)]

    @property
    def unit_bundle(self) -> Bundle:
        return Bundle(role=NodeRole.ROLLOUT, cpus=self.unit_cpus, memory_bytes=self.unit_memory_bytes)

    def learner_bundle(self, learner: LearnerConfig) -> Bundle:
        # slime reserves the GPUs of its ranks itself.
        gpus = 0 if learner.kind == "slime" else sum(learner.reserved_gpus.values())
        return Bundle(role=NodeRole.LEARNER, cpus=self.learner_cpus, gpus=gpus, memory_bytes=self.learner_memory_bytes)

    def in_bundle(self, bundle: str, *, gpus: float = 0.0) -> Resources:
        """Return the resources of an actor in a bundle, whose CPUs and memory are reserved as a whole."""
        if self.is_local:
            return Resources(gpus=gpus)
        return Resources(
            gpus=gpus, bundle=bundle, role=NodeRole.LEARNER if bundle == LEARNER_BUNDLE else NodeRole.ROLLOUT
        )


def cluster_section(given: object) -> ClusterSection:
    """Return the section of a recipe, which may have been read without validation. Raises ConfigError."""
    try:
        return ClusterSection.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(("cluster", *map(str, first["loc"])))
        raise ConfigError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A rollout unit. The first one's actors have no number in their names."""

    number: int

    @property
    def suffix(self) -> str:
        return f"-{self.number}" if self.number else ""

    @property
    def bundle(self) -> str:
        return f"unit-{self.number}"

    def resources(self, cluster: ClusterSection) -> Resources:
        return cluster.in_bundle(self.bundle)
