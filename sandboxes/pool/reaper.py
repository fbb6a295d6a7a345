"""Reaper of a pool: kills sandboxes that nobody holds, and detects sandboxes that died.

Invariants:
- The end of a lease ends its sandbox; a kill is repeated until the sandbox is gone.
- Of the sandboxes that a provider lists, only those with this pool's owner label are touched. Those that belong neither
  to a lease nor to a running create are killed.
- A host that hangs does not delay the others: each sweep of a host is a separate task with a deadline.
- Kills never wait for boots, and kills on one host never wait for those on another.
- A sandbox keeps its slot until it is gone: killed, unknown to its provider, or past the end of its lease there.
- A failed kill is counted, and the reaper retries it after a growing delay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress

from headrace.sandboxes.base import SandboxId
from headrace.sandboxes.errors import SandboxError, SandboxGone
from headrace.sandboxes.pool.boot import KEY_LABEL, OWNER_LABEL
from headrace.sandboxes.pool.config import PoolConfig
from headrace.sandboxes.pool.durable_leases import DurableLeases
from headrace.sandboxes.pool.host import PoolHost
from headrace.sandboxes.pool.lease_table import HeldSandbox
from headrace.sandboxes.retry import full_jitter_s


class Teardown:
    """Kills sandboxes in tasks of the group `tasks`."""

    def __init__(
        self, hosts: Mapping[str, PoolHost], leases: DurableLeases, config: PoolConfig, tasks: asyncio.TaskGroup
    ) -> None:
        self._hosts = hosts
        self._leases = leases
        self._config = config
        self._tasks = tasks
        self._slots = {name: asyncio.Semaphore(config.teardown_concurrency) for name in hosts}
        self._running: dict[SandboxId, asyncio.Task[None]] = {}
        self.failures = 0

    def start(self, held: HeldSandbox) -> asyncio.Task[None]:
        """Start one attempt to kill a sandbox. If an attempt is already running, it is returned instead."""
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
        """Remove a dead sandbox and free its slot. Returns False if it had already been removed."""
        if not self._leases.gone(held):
            return False
        self._hosts[held.host].leave(held.ticket)
        return True

    async def destroy(self, host: PoolHost, sandbox: SandboxId) -> bool:
        """Kill a sandbox that nobody holds. Returns False if that failed."""
        try:
            async with self._slots[host.name], asyncio.timeout(self._config.answer_timeout_s):
                await host.provider.destroy(sandbox)
        except (SandboxError, TimeoutError):
            self.failures += 1
            return False
        return True


class Reaper:
    """Reaper of a pool; `run` it in a task group. The sweeps of hosts run in `tasks`."""

    def __init__(
        self,
        hosts: Mapping[str, PoolHost],
        leases: DurableLeases,
        teardown: Teardown,
        config: PoolConfig,
        owner: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._hosts = hosts
        self._leases = leases
        self._teardown = teardown
        self._config = config
        self._owner = owner
        self._tasks = tasks
        self._swept_at_s: dict[str, float] = {}
        self._sweeping: dict[str, asyncio.Task[None]] = {}
        self.reaped = 0
        self.lost = 0
        self.orphans = 0

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Expire leases, kill sandboxes and sweep hosts until cancelled."""
        while True:
            self._leases.changed.clear()
            now = self._now()
            for held in self._leases.table.pop_expired(now):
                self.reaped += 1
                self._leases.record_end(held)
            for held in self._leases.table.kills_due(now):
                self._teardown.start(held)
            for host in self._hosts.values():
                if self._sweep_at_s(host) <= now:
                    self.sweep(host)
            times = [self._sweep_at_s(host) for host in self._hosts.values() if host.name not in self._sweeping]
            due_s = self._leases.table.next_due_s()
            next_s = min([*times, *([] if due_s is None else [due_s])], default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await self._leases.changed.wait()

    def _sweep_at_s(self, host: PoolHost) -> float:
        is_urgent = host.admission.waiting > 0 or self._leases.has_doubts(host.name)
        every_s = self._config.reconcile_every_s if is_urgent else self._config.sweep_every_s
        return self._swept_at_s.get(host.name, self._now()) + every_s

    def sweep(self, host: PoolHost) -> asyncio.Task[None]:
        """Start comparing a host's sandboxes with the leases. If a sweep is already running, its task is returned
        instead."""
        task = self._sweeping.get(host.name)
        if task is None:
            task = self._sweeping[host.name] = self._tasks.create_task(self._sweep(host))

            def swept(_: asyncio.Task[None]) -> None:
                del self._sweeping[host.name]
                self._swept_at_s[host.name] = self._now()
                self._leases.changed.set()

            task.add_done_callback(swept)
        return task

    async def _sweep(self, host: PoolHost) -> None:
        began_s, before = self._now(), self._leases.table.of_host(host.name)
        try:
            async with asyncio.timeout(self._config.answer_timeout_s):
                infos = await host.provider.list()
        except (SandboxError, TimeoutError):
            # An unreachable provider changes nothing here: the next create reports it.
            return
        existing = {info.id for info in infos}
        for held in before:
            was_ending = held.ending
            if held.ref.id not in existing and self._teardown.forget(held) and not was_ending:
                self.lost += 1
        orphans = [
            info
            for info in infos
            if info.labels.get(OWNER_LABEL) == self._owner
            and not self._leases.table.has(info.id)
            and not self._leases.is_intended(host.name, info.labels.get(KEY_LABEL) or info.idempotency_key)
        ]
        async with asyncio.TaskGroup() as group:
            kills = [group.create_task(self._teardown.destroy(host, info.id)) for info in orphans]
        self.orphans += sum(kill.result() for kill in kills)
        if all(kill.result() for kill in kills):
            self._leases.settle(host.name, began_s)
