"""Simulated provider: a model of latency and failures instead of sandboxes, for virtual time, tuning and fault tests.

Invariants:
- Time comes only from the running event loop and randomness only from the seed: under virtual time, a history is
  reproducible.
- It behaves like a remote service: a create continues when its caller is cancelled, a create that raises
  ProviderUnreachable may have made a sandbox, and a sandbox that is not renewed dies at the end of its lease.
- An idempotency key identifies one sandbox for as long as that sandbox lives.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self

from pydantic import Field, field_serializer, model_validator

from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.slowdowns import Slowdown, Slowdowns, SlowKind, refuse_kinds, refuse_names
from headrace.sandboxes.base import ExecResult, Feature, SandboxId, SandboxInfo, SandboxRef, SandboxSpec, refuse_extras
from headrace.sandboxes.errors import (
    BootFailed,
    CapacityExceeded,
    ImageUnknown,
    ProviderUnreachable,
    RateLimited,
    SandboxGone,
)
from headrace.sandboxes.pool.admission import TokenBucket
from headrace.sandboxes.simulated.sandbox import SimulatedSandbox, SimulatedState

PROVIDER: Final = "simulated"
ONLY_HOST: Final = "host"
"""Name of the host of a provider with one host."""
BROKEN: Final = "broken"
"""Prefix of the names of broken hosts."""
SUCCESS: Final = ExecResult(exit_code=0, stdout=b"", stderr=b"", truncated=False, duration_s=0.0)


class SimulationSection(Section):
    """Latency, capacity and reliability of simulated hosts that a recipe sets. Probabilities are from 0 to 1."""

    seed: int = 0
    """Random seed."""
    hosts: int = Field(default=1, ge=1)
    """Number of hosts of a run; the other keys apply to each of them."""
    broken_hosts: int = Field(default=0, ge=0)
    """Number of hosts that boot sandboxes in which every command fails."""
    capacity: int = Field(default=1000, ge=1)
    """Maximum number of sandboxes booting or alive; further creates raise CapacityExceeded."""
    boot_s: float = Field(default=1.0, gt=0)
    """Median boot time."""
    boot_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation of the logarithm of the boot time."""
    creates_per_s: float | None = Field(default=None, gt=0)
    """Rate above which creates raise RateLimited; None for no limit."""
    boot_failure: float = Field(default=0.0, ge=0, le=1)
    """Probability of BootFailed."""
    images: tuple[str, ...] | None = None
    """Known images; None means all."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Planted slowdowns of the kinds `host` and `image`."""

    @property
    def host_names(self) -> tuple[str, ...]:
        """Name of each host, the broken ones last."""
        if self.hosts == 1:
            return (ONLY_HOST,)
        whole = self.hosts - self.broken_hosts
        return tuple(f"host-{n}" if n < whole else f"{BROKEN}-{n - whole}" for n in range(self.hosts))

    @model_validator(mode="after")
    def _one_host_is_whole(self) -> Self:
        if self.broken_hosts >= self.hosts:
            raise ValueError(f"broken_hosts = {self.broken_hosts} must be below hosts = {self.hosts}: raise hosts")
        return self

    @model_validator(mode="after")
    def _can_be_slow(self) -> Self:
        refuse_kinds(self.slowdowns, (SlowKind.HOST, SlowKind.IMAGE))
        refuse_names(self.slowdowns, SlowKind.HOST, self.host_names)
        if self.images is not None:
            refuse_names(self.slowdowns, SlowKind.IMAGE, self.images)
        return self


class SimulationConfig(SimulationSection):
    """All settings of simulated hosts."""

    stuck_sandbox: float = Field(default=0.0, ge=0, le=1)
    """Probability that a sandbox boots but completes no command."""
    life_s: float | None = Field(default=None, gt=0)
    """Mean lifetime after which sandboxes die on their own."""
    answer_s: float = Field(default=0.01, ge=0)
    """Latency of every other call."""
    exec_s: float = Field(default=0.1, ge=0)
    """Duration of a command."""
    retry_after_s: float = Field(default=1.0, ge=0)
    """`retry_after_s` of a create that is refused because of the rate limit or a lack of capacity."""
    ambiguous: float = Field(default=0.0, ge=0, le=1)
    """Probability that a create makes a sandbox and raises ProviderUnreachable."""
    lost_create: float = Field(default=0.0, ge=0, le=1)
    """Probability that a create never returns; half of these make a sandbox."""
    kill_failure: float = Field(default=0.0, ge=0, le=1)
    """Probability that a kill raises ProviderUnreachable and does nothing."""
    ends_leases: bool = True
    """End sandboxes when their lease ends. If false, only the pool ends them."""
    features: frozenset[Feature] = frozenset({Feature.FREEZE, Feature.EXEC_ID})
    """Features of the provider."""

    @field_serializer("features", when_used="json")
    def _in_order(self, features: frozenset[Feature]) -> list[str]:
        """Sort the features, so that the document is the same in every process."""
        return sorted(features)


@dataclass(slots=True, kw_only=True)
class SimulatedCounts:
    """Totals since the provider was created."""

    create_times_s: list[float] = field(default_factory=list)
    """Arrival times of all creates, including those refused because of the rate limit."""
    born_by_key: Counter[str] = field(default_factory=Counter)
    """Number of sandboxes that started, by idempotency key."""
    killed: int = 0
    died: int = 0
    """Number of sandboxes that died on their own, at the end of their lease, or with the host."""

    @property
    def duplicates(self) -> int:
        """Number of sandboxes that started with another sandbox's key."""
        return sum(count - 1 for count in self.born_by_key.values())


def _nothing(_: SimulatedState) -> None:
    """Callback for the end of a lease when `ends_leases` is false."""


class SimulatedProvider:
    """One simulated host or account. `execute` returns the result of a command in a sandbox."""

    def __init__(
        self,
        config: SimulationSection | None = None,
        execute: Callable[[SandboxId, str], ExecResult] = lambda _sandbox, _command: SUCCESS,
        *,
        name: str = ONLY_HOST,
    ) -> None:
        self._config = SimulationConfig.model_validate(config or SimulationConfig(), from_attributes=True)
        self._execute = execute
        self.name = name
        self._random = random.Random(f"{self._config.seed}.{name}")
        self._slowdowns = Slowdowns(self._config.slowdowns, seed=self._config.seed)
        self._states: dict[SandboxId, SimulatedState] = {}
        self._by_key: dict[str, SimulatedState] = {}
        self._up = asyncio.Event()
        self._up.set()
        self._silent = False
        self._creates_hang = False
        rate = self._config.creates_per_s
        self._bucket = None if rate is None else TokenBucket(rate, max(1, math.ceil(rate)))
        self.counts = SimulatedCounts()

    @property
    def features(self) -> frozenset[Feature]:
        return self._config.features

    @property
    def living(self) -> list[SandboxInfo]:
        """Live sandboxes, including frozen ones, obtained without a call that could fail."""
        now = asyncio.get_running_loop().time()
        return [state.info(now) for state in self._states.values() if state.born.is_set()]

    def go_down(self, *, lose_sandboxes: bool = True, silent: bool = False) -> None:
        """Make every call raise ProviderUnreachable, or, when `silent`, never return."""
        self._up.clear()
        self._silent = silent
        if lose_sandboxes:
            for state in list(self._states.values()):
                self._end(state)
                self.counts.died += 1

    def come_back(self) -> None:
        self._up.set()

    def hang_creates(self) -> None:
        """Make all creates hang without making a sandbox; other calls still work."""
        self._creates_hang = True

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox. Raises ProviderUnreachable, RateLimited, CapacityExceeded, BootFailed, ImageUnknown."""
        self.counts.create_times_s.append(asyncio.get_running_loop().time())
        await self.answer()
        if self._creates_hang:
            await asyncio.get_running_loop().create_future()
        state = self._by_key.get(spec.idempotency_key) if spec.idempotency_key else None
        if state is None:
            if Feature.FOLDERS not in self.features:
                refuse_extras(spec, PROVIDER)
            if self._config.images is not None and spec.image not in self._config.images:
                raise ImageUnknown(f"image {spec.image!r} is unknown on {self.name}")
            if self._bucket is not None and not self._bucket.take(asyncio.get_running_loop().time()):
                raise RateLimited(f"{self.name} sheds load", self._config.retry_after_s)
            if len(self._states) >= self._config.capacity:
                raise CapacityExceeded(f"{self.name} is full", self._config.retry_after_s)
            config = self._config
            boot_s = config.boot_s * self._random.lognormvariate(0.0, config.boot_sigma)
            boot = f"{self.name} {len(self.counts.create_times_s)}"
            boot_s *= self._slowdowns.factor(SlowKind.HOST, self.name, boot)
            boot_s *= self._slowdowns.factor(SlowKind.IMAGE, spec.image, boot)
            chance = self._random.random()
            if chance < config.boot_failure:
                await asyncio.sleep(boot_s)
                raise BootFailed(f"{self.name} could not boot a sandbox")
            chance -= config.boot_failure
            if chance < config.lost_create:
                if self._random.random() < 0.5:
                    self._boot(spec, boot_s)
                await asyncio.get_running_loop().create_future()
            state = self._boot(spec, boot_s)
            if chance - config.lost_create < config.ambiguous:
                # Before or after the end of the boot: the caller cannot know.
                await asyncio.sleep(boot_s * self._random.uniform(0, 2))
                raise ProviderUnreachable(f"502 from {self.name}")
        await state.born.wait()
        if state.gone.is_set():
            raise BootFailed(f"sandbox {state.id} ended while it was booting")
        return SandboxRef(provider=PROVIDER, id=state.id, endpoint=self.name, secret=state.secret)

    def _boot(self, spec: SandboxSpec, boot_s: float) -> SimulatedState:
        state = SimulatedState(
            id=SandboxId(f"{self.name}-{self._random.getrandbits(48):012x}"),
            secret=f"{self._random.getrandbits(64):016x}",
            spec=spec,
            stuck=self._random.random() < self._config.stuck_sandbox,
        )
        self._states[state.id] = state
        if spec.idempotency_key:
            self._by_key[spec.idempotency_key] = state
        state.timers.append(asyncio.get_running_loop().call_later(boot_s, self._on_booted, state))
        return state

    def _on_booted(self, state: SimulatedState) -> None:
        self.counts.born_by_key[state.spec.idempotency_key or state.id] += 1
        state.born.set()
        self.renew(state, state.spec.ttl_s)
        if self._config.life_s is not None:
            life_s = self._random.expovariate(1 / self._config.life_s)
            state.timers.append(asyncio.get_running_loop().call_later(life_s, self._die, state))

    def renew(self, state: SimulatedState, ttl_s: float) -> None:
        """Make the lease end `ttl_s` seconds from now."""
        loop = asyncio.get_running_loop()
        if state.lease is not None:
            state.lease.cancel()
        state.lease = loop.call_later(ttl_s, self._die if self._config.ends_leases else _nothing, state)

    def _die(self, state: SimulatedState) -> None:
        if self._end(state):
            self.counts.died += 1

    def _end(self, state: SimulatedState) -> bool:
        if self._states.pop(state.id, None) is None:
            return False
        if self._by_key.get(state.spec.idempotency_key) is state:
            del self._by_key[state.spec.idempotency_key]
        for timer in [*state.timers, *([state.lease] if state.lease else [])]:
            timer.cancel()
        state.gone.set()
        state.born.set()
        return True

    async def kill(self, state: SimulatedState) -> None:
        await self.answer()
        if self._random.random() < self._config.kill_failure:
            raise ProviderUnreachable(f"502 from {self.name}")
        if self._end(state):
            self.counts.killed += 1

    async def answer(self) -> None:
        """Simulate the latency of a call. Raises ProviderUnreachable while the host is down."""
        await asyncio.sleep(self._config.answer_s)
        if not self._up.is_set():
            if self._silent:
                await asyncio.get_running_loop().create_future()
            raise ProviderUnreachable(f"{self.name} is down")

    async def run(self, state: SimulatedState, command: str) -> ExecResult:
        """Return the result of a command after its duration. Raises SandboxGone as soon as the sandbox dies."""
        await self.answer()
        try:
            async with asyncio.timeout(None if state.stuck else self._config.exec_s):
                await state.gone.wait()
        except TimeoutError:
            return self._execute(state.id, command)
        raise SandboxGone(f"sandbox {state.id} died while the command was running")

    async def attach(self, ref: SandboxRef) -> SimulatedSandbox:
        return SimulatedSandbox(self, self._states.get(ref.id), ref)

    async def list(self) -> list[SandboxInfo]:
        await self.answer()
        return self.living

    async def destroy(self, sandbox: SandboxId) -> None:
        state = self._states.get(sandbox)
        await (self.answer() if state is None else self.kill(state))

    async def aclose(self) -> None:
        """End all sandboxes. Idempotent."""
        for state in list(self._states.values()):
            self._end(state)
