"""The sandbox pool of one host or account: batches of leases over any provider, in plain asyncio.

Invariants:
- Every spec of a `lease` ends as a ref or as a typed error, in its order; one failure ends no sibling.
- Only transient errors are tried again, a limited number of times, with full jitter and not before a `retry_after_s`.
- A lease that is cancelled leaves no sandbox behind. Releases, renewals and freezes never wait for a boot.
- Places of sandboxes that died by themselves come back: while somebody waits, the provider is asked who still lives.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pydantic import Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from headrace.sandboxes.admission import Admission, AdmissionConfig
from headrace.sandboxes.errors import CapacityExceeded, SandboxError, SandboxGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from headrace.sandboxes.admission import Ticket
    from headrace.sandboxes.base import SandboxId, SandboxProvider, SandboxRef, SandboxSpec

PURPOSE_LABEL: Final = "purpose"
EVALUATE: Final = "evaluate"
"""A spec with the label purpose=evaluate is admitted before others."""


class PoolConfig(AdmissionConfig):
    """Places and retries of a pool."""

    boot_attempts: int = Field(default=4, ge=1)
    """Tries of one boot; only transient errors are tried again."""
    retry_base_s: float = Field(default=0.2, gt=0)
    """The n-th wait is drawn from 0 to `retry_base_s * 2**n` (full jitter)."""
    retry_max_s: float = Field(default=10.0, gt=0)
    """Upper end of any wait between tries."""
    reconcile_every_s: float = Field(default=2.0, gt=0)
    """While a lease waits for a place, how often dead sandboxes are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Counts now, and totals since the pool was made."""

    live: int
    booting: int
    waiting: int
    frozen: int
    booted_total: int
    failed_total: int
    released_total: int
    lost_total: int
    """Sandboxes that ended without a release: killed by their lease, by memory, or with their launcher."""


@dataclass(slots=True)
class _Totals:
    booted: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Held:
    ref: SandboxRef
    ticket: Ticket
    frozen: bool = field(default=False)


class Pool:
    """Leases sandboxes of `provider`, which it closes with itself."""

    def __init__(self, provider: SandboxProvider, config: PoolConfig | None = None) -> None:
        self._provider = provider
        self._config = config or PoolConfig()
        self._admission = Admission(self._config)
        self._granted: dict[Ticket, asyncio.Event] = {}
        self._held: dict[SandboxId, _Held] = {}
        self._totals = _Totals()
        self._reconciling = asyncio.Lock()

    async def lease(self, specs: Sequence[SandboxSpec]) -> list[SandboxRef | SandboxError]:
        """Boot one sandbox for each spec. Errors are results, in the order of the specs."""
        tasks: list[asyncio.Task[SandboxRef | SandboxError]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks.extend(group.create_task(self._boot(spec)) for spec in specs)
        except asyncio.CancelledError:
            done = (task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception())
            await self.release([result.id for result in done if not isinstance(result, SandboxError)])
            raise
        return [task.result() for task in tasks]

    async def _boot(self, spec: SandboxSpec) -> SandboxRef | SandboxError:
        ticket = self._admission.ask(evaluation=spec.labels.get(PURPOSE_LABEL) == EVALUATE)
        try:
            await self._wait_for_place(ticket)
            ref = await self._create(spec)
        except SandboxError as error:
            self._totals.failed += 1
            self._leave(ticket)
            return error
        except BaseException:
            self._leave(ticket)
            raise
        self._totals.booted += 1
        if ref.id in self._held:
            # The same idempotency key again: it is the sandbox, and the place, of before.
            self._leave(ticket)
            return ref
        self._admission.booted(ticket)
        self._held[ref.id] = _Held(ref, ticket)
        self._grant()
        return ref

    async def _create(self, spec: SandboxSpec) -> SandboxRef:
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, SandboxError) and error.transient),
            stop=stop_after_attempt(self._config.boot_attempts),
            wait=_FullJitter(self._config.retry_base_s, self._config.retry_max_s),
            reraise=True,
        )
        return await retrying(self._provider.create, spec)

    async def _wait_for_place(self, ticket: Ticket) -> None:
        granted = self._granted[ticket] = asyncio.Event()
        try:
            self._grant()
            while not granted.is_set():
                try:
                    async with asyncio.timeout(self._config.reconcile_every_s):
                        await granted.wait()
                except TimeoutError:
                    await self._reconcile()
        finally:
            del self._granted[ticket]

    def _grant(self) -> None:
        for ticket in self._admission.grant():
            self._granted[ticket].set()

    def _leave(self, ticket: Ticket) -> None:
        self._admission.leave(ticket)
        self._grant()

    async def _reconcile(self) -> None:
        """Forget what the provider no longer has. An unreachable provider changes nothing: create will tell."""
        if self._reconciling.locked():
            return
        async with self._reconciling:
            held = set(self._held)
            try:
                existing = {info.id for info in await self._provider.list()}
            except SandboxError:
                return
            for sandbox_id in held - existing:
                self._forget(sandbox_id)

    def _forget(self, sandbox_id: SandboxId) -> None:
        held = self._held.pop(sandbox_id, None)
        if held is not None:
            self._totals.lost += 1
            self._leave(held.ticket)

    async def release(self, ids: Iterable[SandboxId]) -> None:
        """Kill sandboxes and drop their layers. Unknown ids are ignored; idempotent."""
        await self._for_each(ids, self._release_one)

    async def _release_one(self, sandbox_id: SandboxId) -> None:
        held = self._held.pop(sandbox_id, None)
        if held is None:
            return
        try:
            sandbox = await self._provider.attach(held.ref)
            await sandbox.kill()
        finally:
            self._totals.released += 1
            self._leave(held.ticket)

    async def freeze(self, ids: Iterable[SandboxId]) -> list[SandboxError | None]:
        """Kill the processes, keep the files; the place is free again. Errors are results, in the order of the ids.
        What is already gone stays gone."""
        async with asyncio.TaskGroup() as group:
            freezing = [group.create_task(self._freeze_one(sandbox_id)) for sandbox_id in ids]
        return [task.result() for task in freezing]

    async def _freeze_one(self, sandbox_id: SandboxId) -> SandboxError | None:
        held = self._held.get(sandbox_id)
        if held is None or held.frozen:
            return None
        try:
            sandbox = await self._provider.attach(held.ref)
            await sandbox.freeze()
        except SandboxGone:
            self._forget(sandbox_id)
            return None
        except SandboxError as error:
            return error
        held.frozen = True
        self._leave(held.ticket)
        return None

    async def renew(self, ids: Iterable[SandboxId], ttl_s: float) -> list[SandboxId]:
        """Let the leases end `ttl_s` seconds from now. Returns the ids that are gone."""
        lost: list[SandboxId] = []

        async def renew_one(sandbox_id: SandboxId) -> None:
            held = self._held.get(sandbox_id)
            if held is None:
                lost.append(sandbox_id)
                return
            try:
                sandbox = await self._provider.attach(held.ref)
                await sandbox.renew(ttl_s)
            except SandboxGone:
                lost.append(sandbox_id)
                self._forget(sandbox_id)

        await self._for_each(ids, renew_one)
        return lost

    @staticmethod
    async def _for_each(ids: Iterable[SandboxId], action: Callable[[SandboxId], Awaitable[None]]) -> None:
        async def run(sandbox_id: SandboxId) -> None:
            await action(sandbox_id)

        async with asyncio.TaskGroup() as group:
            for sandbox_id in ids:
                group.create_task(run(sandbox_id))

    async def status(self) -> PoolStatus:
        return PoolStatus(
            live=self._admission.live,
            booting=self._admission.booting,
            waiting=self._admission.waiting,
            frozen=sum(held.frozen for held in self._held.values()),
            booted_total=self._totals.booted,
            failed_total=self._totals.failed,
            released_total=self._totals.released,
            lost_total=self._totals.lost,
        )

    async def aclose(self) -> None:
        """End every sandbox of the provider. Idempotent."""
        self._held.clear()
        await self._provider.aclose()


class _FullJitter(wait_random_exponential):
    """Full jitter (AWS architecture blog, "Exponential backoff and jitter"), but never before the asked time."""

    def __init__(self, base_s: float, max_s: float) -> None:
        super().__init__(multiplier=base_s, max=max_s)

    def __call__(self, retry_state: RetryCallState) -> float:
        wait_s = super().__call__(retry_state)
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        return wait_s + error.retry_after_s if isinstance(error, CapacityExceeded) else wait_s
