"""Interface of a learner.

Invariants:
- A process has one learner, because Megatron and the default process group are process-wide: a second `open` raises.
- All torch work runs in one dedicated thread, and never blocks the event loop.
- A step with non-finite gradients changes only the counter of skipped steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.buffer.trajectories.types import Batch, CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """State that `open` restored. `chain` is the hash chain of all batches trained so far, `parent` the checkpoint's
    version (None without a checkpoint)."""

    parent: PolicyVersion | None
    step: int
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsShard:
    """Safetensors file with Hugging Face names, and the SHA-256 of the file."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> WeightsShard:
        """Return the shard of a complete file, after reading all of it."""
        with path.open("rb") as file:
            return cls(path=path, sha256=hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDirectory:
    """Complete Hugging Face model directory, and the SHA-256 of each of its files by name (hexadecimal, sorted by
    name). It has no subdirectories."""

    path: Path
    digests: Mapping[str, str]

    @classmethod
    def of(cls, path: Path) -> WeightsDirectory:
        """Return the directory of complete files, after reading all of them."""
        files = sorted(file for file in path.iterdir() if file.is_file())
        return cls(path=path, digests={file.name: WeightsShard.of(file).sha256 for file in files})


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDelta:
    """Version `number` of a stream that slime writes into `source`: what has changed since the version before, or a
    whole model from which later ones start."""

    source: Path
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSnapshot:
    """Weights of one version. On disk they are one shard from each trainer rank that has its own parameters, with no
    parameter in two shards, or one Hugging Face directory, or a delta. `live` ones are in the memory of the trainer's
    processes, which send them themselves, until the next step. With none of these, the engines have the weights
    already. Raises ValueError for two of them.

    The files may be read until the learner writes its second snapshot after this one."""

    version: PolicyVersion
    shards: tuple[WeightsShard, ...] = ()
    directory: WeightsDirectory | None = None
    delta: WeightsDelta | None = None
    live: bool = False
    untrained: tuple[str, ...] = ()
    """Prefixes of the model's parameters that the snapshot lacks because the learner does not train them, such as
    `model.visual.`: engines keep theirs. Every other parameter of the model is in it."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.shards, self.directory, self.delta, self.live))) > 1:
            raise ValueError(f"snapshot {self.version} has its weights in two forms; pass one of them")

    @property
    def is_pushed(self) -> bool:
        """Whether there is nothing to push, because somebody else has pushed the weights to the engines."""
        return not (self.shards or self.directory or self.delta or self.live)

    @property
    def transport(self) -> str:
        """Return the value of `push.transport` that this form of weights is for; "" if there are several."""
        return "nccl" if self.live else "delta" if self.delta is not None else ""

    @property
    def files(self) -> tuple[WeightsShard, ...]:
        """Safetensors files of the snapshot, each with a part of the parameters."""
        if self.directory is None:
            return self.shards
        digests = self.directory.digests
        return tuple(
            WeightsShard(path=self.directory.path / name, sha256=digests[name])
            for name in digests
            if name.endswith(".safetensors")
        )


class Learner(Protocol):
    """Trains a policy. `open` is called once per process, before all other methods."""

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """Load the model or the checkpoint. The versions of this incarnation are `epoch.step`."""

    async def step(self, batch: Batch) -> StepReport:
        """Perform one optimizer update. Raises NonFiniteRun after too many skipped steps in a row."""

    async def snapshot(self) -> WeightsSnapshot | None:
        """Write and return the current weights; the next step may begin immediately afterwards. None if these weights
        are not to be pushed."""

    async def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef:
        """Write, fsync and rename a checkpoint directory, with the batches since the last one, the hash chain, and the
        resolved configuration of the run."""

    async def close(self) -> None: ...
