"""Configuration, protocols and reports of pushes. Every method of a protocol has a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, PauseMode, RequestId
from headrace.policies.errors import GroupFailed, SenderFailed
from headrace.policies.push.machine import PushOutcome, PushStep

DEADLINE_MARGIN_S = 1.0
"""Margin between two deadlines for one operation, so that the party that knows more about a failure reports it first.
"""


class PushSection(Section):
    """Settings of weight pushes that a recipe has in `[push]`."""

    transport: Literal["group", "disk", "nccl", "delta", "auto"] = "group"
    """Way of the weights to the engines: `group` broadcasts them in a process group with the sender; with `disk` each
    engine reads the snapshot's directory itself, so the engines must see the run directory under the same path. slime
    has two of its own: with `nccl` its ranks broadcast from their memory; with `delta` it writes only what has changed,
    and each engine host applies that to a copy of the model. A run in which one of these fails goes on with the next of
    `nccl`, `delta` and `disk`. `auto` is `nccl` with slime, and `disk` with other learners."""
    wave_size: int = Field(default=1, gt=0)
    """Number of engines updated concurrently; the others continue to serve."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """Treatment of running requests: `retract` (they continue after recomputing their cache), `abort` (the gateway
    continues their partial answers), `in_place` (they continue with stale keys and values, marked in their spans). An
    engine that does not report the version of each token is always paused with `abort`."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Transport of the process group."""
    local_checkpoint_dir: Path | None = None
    """Folder on the local disk of each engine host for the copy of the model that deltas are applied to, below the id
    of the run; None is /var/tmp/headrace-weights. It is as large as the model, and is left there for a resume."""
    host: str = "127.0.0.1"
    """Address at which engines reach the sender."""
    verify: Literal["snapshot", "off"] = "snapshot"
    """Check of the weights that an engine holds after a push: `snapshot` compares their checksums with the snapshot's.
    SGLang computes checksums differently, so those of its engines are compared with one another: the majority is taken
    as correct, and an engine that differs when there is none reads the snapshot's directory again, which counts as a
    further vote. `off` compares nothing."""


class PushConfig(PushSection):
    """All settings of weight pushes. In a run, `actors/run/clocks.py` derives the limits of reading from the size of
    the model."""

    bucket_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """Maximum size of a bucket; a larger tensor is sent alone."""
    phase_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit for one engine in one phase."""
    transfer_timeout_s: float = Field(default=20.0, gt=0)
    """The sender's time limit for forming a group, and for transferring one bucket. The engines' limits are one second
    longer, and those of the push's calls two seconds longer."""
    load_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for a sender to read its shard or, with `transport = "disk"`, the directory, before the push changes
    any engine."""
    read_timeout_s: float = Field(default=20.0, gt=0)
    """Time limit for one engine to read the directory, with `transport = "disk"`."""
    gate_lease_s: float = Field(default=60.0, gt=0)
    """Time after which a gate opens if the push that closed it has died; a live push renews this lease."""

    @property
    def copies_dir(self) -> Path:
        """Folder of `local_checkpoint_dir`."""
        return self.local_checkpoint_dir or Path("/var/tmp/headrace-weights")

    @property
    def engine_group_timeout_s(self) -> float:
        """Time limit of the engines for a group. The sender's limit, `transfer_timeout_s`, expires first: responsive
        engines then see the group end, and only the unresponsive one is left."""
        return self.transfer_timeout_s + DEADLINE_MARGIN_S

    @property
    def collective_timeout_s(self) -> float:
        """Time limit of the push's calls that form a group or transfer a bucket. Engines that are waiting for another
        engine time out earlier and report it."""
        return self.engine_group_timeout_s + DEADLINE_MARGIN_S

    @property
    def client_phase_timeout_s(self) -> float:
        """Time limit of an engine's client; the push's own limit for a phase expires first."""
        return self.phase_timeout_s + DEADLINE_MARGIN_S

    @property
    def client_transfer_timeout_s(self) -> float:
        """An engine client's time limit for forming a group and for transferring a bucket."""
        return self.collective_timeout_s + DEADLINE_MARGIN_S

    @property
    def client_read_timeout_s(self) -> float:
        """An engine client's time limit for reading a directory; the push's own limit, `read_timeout_s`, expires
        first."""
        return self.read_timeout_s + DEADLINE_MARGIN_S


class Gate(Protocol):
    """Controls the admission of requests to engines, at all gateways. A closed gate opens by itself after `lease_s`."""

    async def close(self, engine_id: EngineId, lease_s: float) -> None: ...

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        """Admit requests again. They carry `cache_namespace`, which is the engine's version if pushes are in place.
        Returns the requests that were aborted while the gate was closed: the engine may have lost these aborts."""


class Answering(Protocol):
    """Push that answers the calls of a trainer's weight updater to engines."""

    async def answer(self, engine_id: EngineId, method: str, arguments: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """Engine that a trainer sends to: its number of processes, and the version that it reports. If that is not the one
    that the trainer sent last, the engine is new or was restarted, and is in no group."""

    engine_id: EngineId
    ranks: int
    holds: PolicyVersion


class LiveTrainer(Protocol):
    """A trainer whose own processes send their weights to engines. All methods raise SenderFailed if it cannot, also
    because it has trained on: a failed transfer costs these processes, and no engine can expect the rest of it."""

    async def connect_engines(self, version: PolicyVersion, engines: Sequence[GroupMember], timeout_s: float) -> None:
        """Form the process groups with these engines; those of the last call are kept if they have worked, and their
        members are the same and hold what was sent."""

    async def update_engines(self, version: PolicyVersion, timeout_s: float) -> None:
        """Send the weights of this version to the engines of the last `connect_engines`."""

    async def give_up_push(self, reason: str) -> None:
        """End the processes, which wait in a transfer that cannot succeed any more."""


class Trainer(LiveTrainer, Protocol):
    """A trainer, and the way back: its updater's calls to engines belong to the `push` that began last."""

    push: Answering | None


class Journal(Protocol):
    """Callback that is awaited before each step, so that an interrupted push can be recovered."""

    async def __call__(self, push_id: str, step: PushStep) -> None: ...


@dataclass(slots=True, kw_only=True)
class EnginePush:
    """Outcome and costs of a push for one engine.

    `gate_s` is the time from closing to opening its gate (or to the end of the push, if it stays closed), `pause_s` the
    duration of the pausing call, `paused_s` the time from then until the resume, `transfer_s` that of the broadcast or
    of reading the directory. `verified` is True if its checksums equal the snapshot's.
    `retracted` requests were running when the gate was closed, and `recomputed_tokens` were cached for them (an upper
    bound, because cached prefixes count too); both are 0 if the pause keeps the cache. `flushed` is True if no prefix
    of older weights is cached. New requests carry `cache_namespace`."""

    engine_id: EngineId
    outcome: PushOutcome = PushOutcome.BEHIND
    failure: str = ""
    ranks: int = 1
    gate_s: float = 0.0
    pause_s: float = 0.0
    paused_s: float = 0.0
    transfer_s: float = 0.0
    received_bytes: int = 0
    in_flight: int = 0
    retracted: int = 0
    recomputed_tokens: int = 0
    flushed: bool = False
    verified: bool = False
    cache_namespace: str | None = None

    @property
    def gb_per_s(self) -> float:
        return self.received_bytes / self.transfer_s / 1e9 if self.transfer_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """Report of one push. `seconds` is the total of each phase over the waves; `sent_bytes` counts a bucket once for
    each group it was sent to, and a directory once for each engine that read it. `sender_failure` is set if a sender
    died, or the directory was changed, and the push ended early."""

    push_id: str
    version: PolicyVersion
    engines: tuple[EnginePush, ...]
    seconds: dict[str, float]
    total_s: float
    sent_bytes: int
    sender_failure: SenderFailed | GroupFailed | None

    @property
    def quarantined(self) -> tuple[EngineId, ...]:
        return tuple(item.engine_id for item in self.engines if item.outcome is PushOutcome.QUARANTINED)

    @property
    def updated(self) -> tuple[EngineId, ...]:
        return tuple(item.engine_id for item in self.engines if item.outcome is PushOutcome.UPDATED)

    @property
    def gates_s(self) -> float:
        """Total number of seconds for which gates were closed, over all engines: the generation time that the push
        cost."""
        return sum(item.gate_s for item in self.engines)
