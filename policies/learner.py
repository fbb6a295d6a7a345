"""The contract of a learner.

Invariants:
- One learner per process (Megatron and the default process group are process-global): a second `open` is a typed error.
- All torch work runs in one dedicated thread; the event loop stays live.
- A step with non-finite gradients changes nothing but the counter of skipped steps.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.buffer.types import Batch, CheckpointRef, StepReport
    from headrace.buffer.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What `open` restored. `chain` is the hash chain of all batches trained so far, `parent` the checkpoint's
    version (None at the start)."""

    parent: PolicyVersion | None
    step: int
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsShard:
    """A safetensors file in Hugging Face names, and the SHA-256 of the whole file."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> WeightsShard:
        """A file that is there and complete; reads all of it."""
        with path.open("rb") as file:
            return cls(path=path, sha256=hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSnapshot:
    """The weights of one version: one shard from each trainer rank that has parameters of its own, no parameter twice,
    complete before this object exists.

    Whoever receives the snapshot may read it until the learner writes the one after the next."""

    version: PolicyVersion
    shards: tuple[WeightsShard, ...]


class Learner(Protocol):
    """Steps a policy. `open` is called once per process, before everything else."""

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """Load the model or the checkpoint; versions of this incarnation are `epoch.step`."""
        ...

    async def step(self, batch: Batch) -> StepReport:
        """One optimizer update. Raises NonFiniteRun after K skipped steps in a row."""
        ...

    async def snapshot(self) -> WeightsSnapshot:
        """The current weights; the next step may begin at once."""
        ...

    async def save(self) -> CheckpointRef:
        """Write, fsync and rename a checkpoint directory; the batches since the last one and the hash chain go with
        it."""
        ...

    async def close(self) -> None: ...
