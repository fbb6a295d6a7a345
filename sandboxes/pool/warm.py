"""Sandboxes booted before anybody asks, by image.

Invariants:
- Only specs that ask for nothing but an image are served; what is handed out has just run a command.
- They boot at the lowest priority and give way when a boot finds no place, also to one that waits since before they
  were ready.
- One that is handed out, dead or expired is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.base import Network, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.pool.boot import HOLDER_LABEL, PURPOSE_LABEL, LeaseRequest
from headrace.sandboxes.pool.slots import Priority
from headrace.sandboxes.retry import full_jitter_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from headrace.sandboxes.base import SandboxId
    from headrace.sandboxes.pool.boot import Booter
    from headrace.sandboxes.pool.config import PoolConfig
    from headrace.sandboxes.pool.durable_leases import DurableLeases
    from headrace.sandboxes.pool.host import Host
    from headrace.sandboxes.pool.lease_table import Held

WARM_HOLDER: Final = "(warm)"
_MOST_FAILURES: Final = 20
logger = logging.getLogger(__name__)


def is_plain(spec: SandboxSpec) -> bool:
    """It asks for an image and nothing else that a ready sandbox could lack."""
    limits = (spec.cpu, spec.memory_bytes, spec.disk_bytes, spec.pids)
    return limits == (None,) * 4 and spec.network is Network.NONE and not (spec.mounts or spec.folders)


class WarmStock:
    """`run` it in a task group, which is `tasks`. `renew` renews all that a holder has."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        custody: DurableLeases,
        booter: Booter,
        config: PoolConfig,
        tasks: asyncio.TaskGroup,
        renew: Callable[[str, float], Awaitable[object]],
    ) -> None:
        self._hosts = hosts
        self._custody = custody
        self._booter = booter
        self._config = config
        self._tasks = tasks
        self._renew = renew
        self._booting = dict.fromkeys(config.warm, 0)
        self._failures = dict.fromkeys(config.warm, 0)
        self._taken = asyncio.Event()
        self.served = 0
        self.dead = 0

    def ready(self, image: str | None = None) -> list[Held]:
        """Those of an image, or all."""
        warm = (held for held in self._custody.holdings.of_holder(WARM_HOLDER) if held.warm)
        return [held for held in warm if image is None or held.image == image]

    async def take(self, request: LeaseRequest) -> Held | None:
        """One that lives, now the request's and durable; None when there is none."""
        spec = request.spec
        while is_plain(spec) and (ready := self.ready(spec.image)):
            held = ready[-1]
            held.warm = False
            self._taken.set()
            try:
                is_alive = await self._is_alive(held, spec.ttl_s)
                if is_alive and self._custody.holdings.get(held.ref.id) is held:
                    await self._hand_over(held, request)
                    return held
            except BaseException:
                self._custody.end(held)
                raise
            self.dead += 1
            self._custody.end(held)
        return None

    async def _is_alive(self, held: Held, ttl_s: float) -> bool:
        try:
            async with asyncio.timeout(self._config.warm_check_s):
                sandbox = await self._hosts[held.host].provider.attach(held.ref)
                await sandbox.renew(ttl_s)
                result = await sandbox.exec("true", timeout_s=self._config.warm_check_s)
        except (SandboxError, TimeoutError):
            return False
        return result.exit_code == 0

    async def _hand_over(self, held: Held, request: LeaseRequest) -> None:
        now = asyncio.get_running_loop().time()
        held.dies_at_s = now + request.spec.ttl_s
        self._custody.hand_over(held, request.holder, request.spec.idempotency_key, held.dies_at_s)
        await self._custody.written(held)
        self.served += 1

    def give_way(self, host: Host) -> None:
        """Somebody finds no place there: one ready sandbox ends."""
        if (held := next((held for held in self.ready() if held.host == host.name), None)) is not None:
            self._custody.end(held)

    def _give_back(self, sandbox: SandboxId) -> None:
        """Whoever came while it booted, and finds no place, goes first."""
        held = self._custody.holdings.get(sandbox)
        if held is not None and held.warm and self._hosts[held.host].admission.is_short():
            self._custody.end(held)

    async def run(self) -> None:
        """Refill and renew until cancelled."""
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time() + self._config.warm_ttl_s / 4
        while self._config.warm:
            self._taken.clear()
            self._refill()
            try:
                async with asyncio.timeout_at(renew_at_s):
                    await self._taken.wait()
            except TimeoutError:
                await self._renew(WARM_HOLDER, self._config.warm_ttl_s)
                renew_at_s = loop.time() + self._config.warm_ttl_s / 4

    def _refill(self) -> None:
        for image, wanted in self._config.warm.items():
            for _ in range(wanted - len(self.ready(image)) - self._booting[image]):
                self._booting[image] += 1
                self._tasks.create_task(self._boot(image))

    async def _boot(self, image: str) -> None:
        labels = {HOLDER_LABEL: WARM_HOLDER, PURPOSE_LABEL: "warm"}
        spec = SandboxSpec(image=image, ttl_s=self._config.warm_ttl_s, labels=labels)
        try:
            lease = await self._booter.boot(LeaseRequest(spec=spec), Priority.WARM)
            self._failures[image] = 0
            self._give_back(lease.ref.id)
        except SandboxError as error:
            self._failures[image] = min(_MOST_FAILURES, self._failures[image] + 1)
            logger.warning("no warm sandbox of image %s: %s", image, error)
            await asyncio.sleep(full_jitter_s(self._config, self._failures[image]))
        finally:
            self._booting[image] -= 1
            self._taken.set()
