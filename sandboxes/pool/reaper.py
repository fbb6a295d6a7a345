"""Ends what nobody wants any more, and notices what ended by itself.

Invariants:
- A lease that is over ends its sandbox; what ends is killed until it is gone.
- Of what a provider lists, only sandboxes with this pool's owner label are touched: those that no holding and no create
  under way accounts for are killed.
- A host that hangs holds up nobody: every look at a host is a task of its own with a deadline.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.pool.boot import KEY_LABEL, OWNER_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.sandboxes.base import SandboxInfo
    from headrace.sandboxes.pool.config import PoolConfig
    from headrace.sandboxes.pool.durable_leases import DurableLeases
    from headrace.sandboxes.pool.host import Host
    from headrace.sandboxes.pool.lease_table import Held
    from headrace.sandboxes.pool.teardown import Teardown


class Reaper:
    """`run` it in a task group; `tasks` carries its looks at hosts."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        custody: DurableLeases,
        teardown: Teardown,
        config: PoolConfig,
        owner: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._hosts = hosts
        self._custody = custody
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
        """Until cancelled."""
        while True:
            self._custody.changed.clear()
            now = self._now()
            for held in self._custody.holdings.pop_expired(now):
                self.reaped += 1
                self._custody.expired(held)
            for held in self._custody.holdings.kills_due(now):
                self._teardown.start(held)
            for host in self._hosts.values():
                if self._sweep_at_s(host) <= now:
                    self.look(host)
            await self._until_due()

    async def _until_due(self) -> None:
        times = [self._sweep_at_s(host) for host in self._hosts.values() if host.name not in self._sweeping]
        due_s = self._custody.holdings.next_due_s()
        next_s = min([*times, *([] if due_s is None else [due_s])], default=None)
        try:
            async with asyncio.timeout_at(next_s):
                await self._custody.changed.wait()
        except TimeoutError:
            return

    def _sweep_at_s(self, host: Host) -> float:
        is_urgent = host.admission.waiting > 0 or self._custody.has_doubts(host.name)
        every_s = self._config.reconcile_every_s if is_urgent else self._config.sweep_every_s
        return self._swept_at_s.get(host.name, self._now()) + every_s

    def look(self, host: Host) -> asyncio.Task[None]:
        """Compare what the host has with what it should have; the same task while that goes on."""
        task = self._sweeping.get(host.name)
        if task is None:
            task = self._sweeping[host.name] = self._tasks.create_task(self._sweep(host))
            task.add_done_callback(lambda _: self._swept(host))
        return task

    def _swept(self, host: Host) -> None:
        del self._sweeping[host.name]
        self._swept_at_s[host.name] = self._now()
        self._custody.changed.set()

    async def _sweep(self, host: Host) -> None:
        """An unreachable provider changes nothing: creates will tell."""
        began_s, before = self._now(), self._custody.holdings.of_host(host.name)
        try:
            async with asyncio.timeout(self._config.answer_timeout_s):
                infos = await host.provider.list()
        except (SandboxError, TimeoutError):
            return
        existing = {info.id for info in infos}
        for held in before:
            if held.ref.id not in existing:
                self._vanished(held)
        strangers = [info for info in infos if self._is_orphan(host, info)]
        async with asyncio.TaskGroup() as group:
            kills = [group.create_task(self._teardown.destroy(host, info.id)) for info in strangers]
        self.orphans += sum(kill.result() for kill in kills)
        if all(kill.result() for kill in kills):
            self._custody.settle(host.name, began_s)

    def _vanished(self, held: Held) -> None:
        was_ending = held.ending
        if self._teardown.forget(held) and not was_ending:
            self.lost += 1

    def _is_orphan(self, host: Host, info: SandboxInfo) -> bool:
        key = info.labels.get(KEY_LABEL) or info.idempotency_key
        return (
            info.labels.get(OWNER_LABEL) == self._owner
            and not self._custody.accounts_for(info.id)
            and not self._custody.is_intended(host.name, key)
        )
