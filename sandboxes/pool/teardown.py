"""Teardown of the sandboxes of a pool, with a concurrency limit of its own.

Invariants:
- Kills never wait for boots, and kills on one host never wait for those on another.
- A sandbox has its place until it is gone: killed, unknown to its provider, or past the end of its lease there.
- A kill that failed is counted, and repeated by the reaper after a growing delay.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxError, SandboxGone
from headrace.sandboxes.retry import full_jitter_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.sandboxes.base import SandboxId
    from headrace.sandboxes.pool.config import PoolConfig
    from headrace.sandboxes.pool.durable_leases import DurableLeases
    from headrace.sandboxes.pool.host import Host
    from headrace.sandboxes.pool.lease_table import HeldSandbox


class Teardown:
    """Kills sandboxes in tasks of the group `tasks`."""

    def __init__(
        self, hosts: Mapping[str, Host], leases: DurableLeases, config: PoolConfig, tasks: asyncio.TaskGroup
    ) -> None:
        self._hosts = hosts
        self._leases = leases
        self._config = config
        self._tasks = tasks
        self._slots = {name: asyncio.Semaphore(config.teardown_concurrency) for name in hosts}
        self._running: dict[SandboxId, asyncio.Task[None]] = {}
        self.failures = 0

    def start(self, held: HeldSandbox) -> asyncio.Task[None]:
        """Start one attempt to kill a sandbox. Returns the running attempt if there is one."""
        task = self._running.get(held.ref.id)
        if task is None:
            # Not due again before this attempt is over.
            held.kill_at_s = math.inf
            task = self._running[held.ref.id] = self._tasks.create_task(self._kill(held))
            task.add_done_callback(lambda _: self._running.pop(held.ref.id))
        return task

    async def _kill(self, held: HeldSandbox) -> None:
        try:
            async with self._slots[held.host], asyncio.timeout(self._config.answer_timeout_s):
                sandbox = await self._hosts[held.host].provider.attach(held.ref)
                await sandbox.kill()
        except SandboxGone:
            pass
        except (SandboxError, TimeoutError):
            self.failures += 1
            now = asyncio.get_running_loop().time()
            if now < held.dies_at_s:
                held.kills += 1
                held.kill_at_s = now + full_jitter_s(self._config, held.kills)
                self._leases.changed.set()
                return
        self.forget(held)

    def forget(self, held: HeldSandbox) -> bool:
        """Remove a dead sandbox and free its place. Returns False if it was removed before."""
        if not self._leases.gone(held):
            return False
        self._hosts[held.host].leave(held.ticket)
        return True

    async def destroy(self, host: Host, sandbox: SandboxId) -> bool:
        """Kill a sandbox that nobody holds. Returns False if that failed."""
        try:
            async with self._slots[host.name], asyncio.timeout(self._config.answer_timeout_s):
                await host.provider.destroy(sandbox)
        except (SandboxError, TimeoutError):
            self.failures += 1
            return False
        return True
