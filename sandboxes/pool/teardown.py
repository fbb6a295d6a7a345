"""The end of sandboxes, with a capacity of its own.

Invariants:
- Kills never wait for boots, nor those of one host for those of another.
- A sandbox keeps its place until it is gone: killed, unknown to its provider, or past the end of its lease there.
- A kill that failed is counted and tried again, later and later, by the reaper.
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
    from headrace.sandboxes.pool.lease_table import Held


class Teardown:
    """Runs its kills in `tasks`."""

    def __init__(
        self, hosts: Mapping[str, Host], custody: DurableLeases, config: PoolConfig, tasks: asyncio.TaskGroup
    ) -> None:
        self._hosts = hosts
        self._custody = custody
        self._config = config
        self._tasks = tasks
        self._slots = {name: asyncio.Semaphore(config.teardown_concurrency) for name in hosts}
        self._running: dict[SandboxId, asyncio.Task[None]] = {}
        self.killed = 0
        self.failures = 0

    def start(self, held: Held) -> asyncio.Task[None]:
        """One try to kill what ends; the same one while it runs."""
        task = self._running.get(held.ref.id)
        if task is None:
            # Not due again before this try is over.
            held.kill_at_s = math.inf
            task = self._running[held.ref.id] = self._tasks.create_task(self._kill(held))
            task.add_done_callback(lambda _: self._running.pop(held.ref.id))
        return task

    async def _kill(self, held: Held) -> None:
        try:
            async with self._slots[held.host], asyncio.timeout(self._config.answer_timeout_s):
                sandbox = await self._hosts[held.host].provider.attach(held.ref)
                await sandbox.kill()
        except SandboxGone:
            pass
        except (SandboxError, TimeoutError):
            self.failures += 1
            if asyncio.get_running_loop().time() < held.dies_at_s:
                self._later(held)
                return
        self.killed += 1
        self.forget(held)

    def _later(self, held: Held) -> None:
        held.kills += 1
        held.kill_at_s = asyncio.get_running_loop().time() + full_jitter_s(self._config, held.kills)
        self._custody.changed.set()

    def forget(self, held: Held) -> bool:
        """It is gone, and its place free. False when that was known."""
        if not self._custody.gone(held):
            return False
        self._hosts[held.host].leave(held.ticket)
        return True

    async def destroy(self, host: Host, sandbox: SandboxId) -> bool:
        """Kill what nobody holds. False when that failed."""
        try:
            async with self._slots[host.name], asyncio.timeout(self._config.answer_timeout_s):
                await host.provider.destroy(sandbox)
        except (SandboxError, TimeoutError):
            self.failures += 1
            return False
        return True
