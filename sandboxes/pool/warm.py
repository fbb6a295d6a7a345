"""Stock of sandboxes that have been booted in advance, by image.

Invariants:
- Only specs that request nothing but an image are served; a sandbox is handed out only after it has just run a command.
- Warm sandboxes boot at the lowest priority and are ended when another boot finds no slot, even one that was already
  waiting before they were ready.
- A warm sandbox that is handed out, dead or expired is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from headrace.buffer.primitives.trace_context import remote_context
from headrace.sandboxes.base import Network, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.pool import boot_spans
from headrace.sandboxes.pool.boot import HOLDER_LABEL, PURPOSE_LABEL, LeaseRequest, PoolBooter
from headrace.sandboxes.pool.config import PoolConfig
from headrace.sandboxes.pool.durable_leases import DurableLeases
from headrace.sandboxes.pool.host import PoolHost
from headrace.sandboxes.pool.lease_table import HeldSandbox
from headrace.sandboxes.pool.slots import Priority
from headrace.sandboxes.retry import full_jitter_s

WARM_HOLDER: Final = "(warm)"
_MOST_FAILURES: Final = 20
logger = logging.getLogger(__name__)


def is_plain(spec: SandboxSpec) -> bool:
    """Return whether a spec requests only an image, and nothing else that a warm sandbox could lack."""
    limits = (spec.cpu, spec.memory_bytes, spec.disk_bytes, spec.pids)
    return limits == (None,) * 4 and spec.network is Network.NONE and not (spec.mounts or spec.folders)


class WarmStock:
    """Boots and hands out warm sandboxes; `run` it in the task group `tasks`. `renew` renews all leases of a holder."""

    def __init__(
        self,
        hosts: Mapping[str, PoolHost],
        leases: DurableLeases,
        booter: PoolBooter,
        config: PoolConfig,
        tasks: asyncio.TaskGroup,
        renew: Callable[[str, float], Awaitable[object]],
    ) -> None:
        self._hosts = hosts
        self._leases = leases
        self._booter = booter
        self._config = config
        self._tasks = tasks
        self._renew = renew
        self._booting = dict.fromkeys(config.warm, 0)
        self._failures = dict.fromkeys(config.warm, 0)
        self._taken = asyncio.Event()
        self.served = 0
        self.dead = 0

    def ready(self, image: str | None = None) -> list[HeldSandbox]:
        """Return the warm sandboxes of an image, or of all images."""
        warm = (held for held in self._leases.table.of_holder(WARM_HOLDER) if held.warm)
        return [held for held in warm if image is None or held.image == image]

    async def take(self, request: LeaseRequest) -> HeldSandbox | None:
        """Return a live sandbox that the ledger now records for the request, or None if there is none."""
        spec = request.spec
        while is_plain(spec) and (ready := self.ready(spec.image)):
            held = ready[-1]
            held.warm = False
            self._taken.set()
            span = boot_spans.boot_span(
                remote_context(request.traceparent),
                {
                    boot_spans.SANDBOX_HOST: held.host,
                    boot_spans.SANDBOX_IMAGE: spec.image,
                    boot_spans.SANDBOX_WARM: True,
                },
            )
            try:
                with span:
                    async with asyncio.timeout(self._config.warm_check_s):
                        sandbox = await self._hosts[held.host].provider.attach(held.ref)
                        await sandbox.renew(spec.ttl_s)
                        result = await sandbox.exec("true", timeout_s=self._config.warm_check_s)
                is_alive = result.exit_code == 0
            except (SandboxError, TimeoutError):
                is_alive = False
            except BaseException:
                self._leases.end(held)
                raise
            try:
                # The lease may have ended during the check.
                if is_alive and self._leases.table.get(held.ref.id) is held:
                    held.dies_at_s = asyncio.get_running_loop().time() + spec.ttl_s
                    self._leases.table.hand_over(
                        held, holder=request.holder, request_key=spec.idempotency_key, deadline_s=held.dies_at_s
                    )
                    await self._leases.written(held)
                    self.served += 1
                    return held
            except BaseException:
                self._leases.end(held)
                raise
            self.dead += 1
            self._leases.end(held)
        return None

    def give_way(self, host: PoolHost) -> None:
        """End one warm sandbox on a host that has no free slot for another boot."""
        if (held := next((held for held in self.ready() if held.host == host.name), None)) is not None:
            self._leases.end(held)

    async def run(self) -> None:
        """Refill the stock and renew its leases until cancelled."""
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time() + self._config.warm_ttl_s / 4
        while self._config.warm:
            self._taken.clear()
            for image, wanted in self._config.warm.items():
                for _ in range(wanted - len(self.ready(image)) - self._booting[image]):
                    self._booting[image] += 1
                    self._tasks.create_task(self._boot(image))
            try:
                async with asyncio.timeout_at(renew_at_s):
                    await self._taken.wait()
            except TimeoutError:
                await self._renew(WARM_HOLDER, self._config.warm_ttl_s)
                renew_at_s = loop.time() + self._config.warm_ttl_s / 4

    async def _boot(self, image: str) -> None:
        labels = {HOLDER_LABEL: WARM_HOLDER, PURPOSE_LABEL: "warm"}
        spec = SandboxSpec(image=image, ttl_s=self._config.warm_ttl_s, labels=labels)
        try:
            lease = await self._booter.boot(LeaseRequest(spec=spec), Priority.WARM)
            self._failures[image] = 0
            # A boot that came while this one ran, and finds no place, goes first.
            held = self._leases.table.get(lease.ref.id)
            if held is not None and held.warm and self._hosts[held.host].admission.is_short():
                self._leases.end(held)
        except SandboxError as error:
            self._failures[image] = min(_MOST_FAILURES, self._failures[image] + 1)
            logger.warning("cannot boot a warm sandbox of image %s: %s", image, error)
            await asyncio.sleep(full_jitter_s(self._config, self._failures[image]))
        finally:
            self._booting[image] -= 1
            self._taken.set()
