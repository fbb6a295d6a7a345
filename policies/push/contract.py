"""What a push is told, needs and reports. Messages are small and frozen; protocols have a deadline in every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.engine import PauseMode
from headrace.policies.push.machine import PushOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.engine import EngineId, EngineInfo, RequestId
    from headrace.policies.errors import GroupFailed, SenderFailed
    from headrace.policies.push.machine import Step
    from headrace.policies.push.tensors import Bucket


DEADLINE_MARGIN_S = 1.0
"""Between two deadlines for one thing, of which one is to pass first: who knows more about the failure tells it."""


class PushConfig(BaseModel):
    """How weights travel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wave_size: int = Field(default=1, gt=0)
    """Engines updated at once; the others serve meanwhile."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """What happens to running requests: `retract` (they go on, recomputed), `abort` (the gateway goes on from their
    partial answers), `in_place` (they go on with stale keys and values; their spans say so). An engine that does not
    tell which version sampled which token is always paused with `abort`."""
    bucket_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """Largest bucket; a larger tensor travels alone."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Transport of the process group."""
    host: str = "127.0.0.1"
    """Address at which engines reach the sender."""
    phase_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for one engine in one phase."""
    transfer_timeout_s: float = Field(default=20.0, gt=0)
    """Longest formation of a group, and longest transfer of one bucket, at the sender; the engines' ends last a second
    longer, and the push's calls two."""
    load_timeout_s: float = Field(default=300.0, gt=0)
    """Longest reading of a shard by its sender, before any engine is touched; a second reads about a GB."""
    gate_lease_s: float = Field(default=60.0, gt=0)  # derived in a run, see `actors/run/clocks.py`
    """A gate opens by itself this long after the push that closed it is gone; it is renewed meanwhile."""
    verify: Literal["snapshot", "engines", "off"] = "snapshot"
    """Compare each engine's checksums with the snapshot's (SGLang's, which are made otherwise, with those of most
    engines of the push), among the engines only, or not at all. Of two engines that contradict each other the first one
    is believed."""

    @property
    def engine_group_timeout_s(self) -> float:
        """Of the engines' ends of a group. The sender's end, `transfer_timeout_s`, passes first: what it gives up ends
        at the engines that answer, too, and only the silent one is left."""
        return self.transfer_timeout_s + DEADLINE_MARGIN_S

    @property
    def collective_timeout_s(self) -> float:
        """Of the push's own calls in which a group is formed or a bucket taken: engines that wait for another one say
        so before."""
        return self.engine_group_timeout_s + DEADLINE_MARGIN_S

    @property
    def client_phase_timeout_s(self) -> float:
        """Of an engine's client: the push decides when a phase has taken too long."""
        return self.phase_timeout_s + DEADLINE_MARGIN_S

    @property
    def client_transfer_timeout_s(self) -> float:
        """The same for the formation of a group and for a bucket."""
        return self.collective_timeout_s + DEADLINE_MARGIN_S


class Load(Protocol):
    """Numbers of requests, and of the tokens whose keys and values are cached for them."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...


class EngineControl(Protocol):
    """What a push needs of an engine; SGLangEngine has it. Every method has a deadline of its own and raises
    EngineError."""

    @property
    def engine_id(self) -> EngineId: ...

    async def info(self) -> EngineInfo: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_id: RequestId) -> None: ...

    async def load(self) -> Load: ...

    async def begin_update(self) -> None: ...

    async def end_update(self) -> None: ...

    async def join_group(
        self, name: str, *, host: str, port: int, rank: int, world_size: int, backend: str
    ) -> None: ...

    async def leave_group(self, name: str) -> None: ...

    async def update(self, bucket: Bucket, *, group: str, version: PolicyVersion | None) -> None: ...

    async def flush(self) -> None: ...

    async def checksums(self) -> dict[str, str]: ...


class Gate(Protocol):
    """Admission to one engine at all gateways. `close` is a lease: it ends by itself after `lease_s`."""

    async def close(self, engine_id: EngineId, lease_s: float) -> None: ...

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        """From now on new requests carry `cache_namespace`: where pushes come in place, the version the engine has.
        Returns the requests whose abort was asked for while the gate was closed: the engine may have lost it."""
        ...


class Journal(Protocol):
    """Awaited before each step is taken; who is killed in the step can be told from it."""

    async def __call__(self, push_id: str, step: Step) -> None: ...


@dataclass(slots=True, kw_only=True)
class EnginePush:
    """One engine's part in a report: what the push cost it.

    `gate_s` is from closing to opening its gate, or to the end of the push where it stays closed, `pause_s` the call
    that paused it, `paused_s` from there to the resume, `transfer_s` the broadcast. `retracted` requests were running
    when its gate was closed, and `recomputed_tokens` were cached for them (an upper bound: cached prefixes count too);
    both 0 where a pause keeps the cache. `flushed`: no prefix of older weights is cached any more. New requests carry
    `cache_namespace`."""

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
    cache_namespace: str | None = None

    @property
    def gb_per_s(self) -> float:
        return self.received_bytes / self.transfer_s / 1e9 if self.transfer_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """`seconds` sums each phase over the waves; `sent_bytes` counts each bucket once per group it was sent to.

    `sender_failure` is not None when a sender died and the push ended early."""

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
        """Seconds of closed gates, summed over the engines: the generation that the push cost."""
        return sum(item.gate_s for item in self.engines)
