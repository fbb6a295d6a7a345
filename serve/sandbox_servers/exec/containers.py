"""Containers of the drop-in contract: sandboxes with a lease that is renewed by every request that concerns them.

Invariants:
- A container that gets no request for `lease_s` seconds ends, even if this server dies, because the provider enforces
  the lease.
- While a command is running, the lease of its container covers the command's timeout.
- A create that finds no room waits in a bounded queue for another container to end. After its own timeout, it fails
  with the time to wait before the next attempt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.errors import CapacityExceeded, SandboxError, SandboxGone
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.exec.registry import Container, LeasedSandbox, SandboxRegistry

MAX_CONTAINERS: Final = 512
MAX_WAITING: Final = 4096
_SET_UP_S: Final = 60.0


class Containers:
    """One server's containers."""

    def __init__(self, registry: SandboxRegistry, lease_s: float) -> None:
        self.registry = registry
        self.lease_s = lease_s
        self._busy_until: dict[str, list[float]] = {}
        self._ended = asyncio.Condition()
        self._waiting = 0

    def all(self, owner: Owner) -> list[tuple[LeasedSandbox, Container]]:
        rows = self.registry.table.rows()
        return [(row, row.container) for row in rows if row.container is not None and row.owner == owner.name]

    def find(self, owner: Owner, container: str) -> LeasedSandbox:
        """Find a container by id or name. Raises SandboxGone."""
        for row, known in self.all(owner):
            if container in (row.id, known.name):
                return row
        raise SandboxGone(f"no container {container[:80]}: destroyed, expired, or never created")

    def find_lease(self, owner: Owner, lease_id: str) -> LeasedSandbox:
        """Find a container by its lease. Raises SandboxGone."""
        for row, known in self.all(owner):
            if lease_id and known.lease_id == lease_id:
                return row
        raise SandboxGone(f"Unknown lease_id: {lease_id[:80]}")

    # Creating and destroying

    async def create(self, owner: Owner, image: str, container: Container, *, key: str, wait_s: float) -> LeasedSandbox:
        """Create a container with its working folder. Raises SandboxError; CapacityExceeded after `wait_s`."""
        if self._waiting >= MAX_WAITING:
            raise CapacityExceeded(f"{self._waiting} containers are already waiting for room")
        spec = SandboxSpec(image=image, ttl_s=self.lease_s, idempotency_key=key, labels={"container": container.name})
        self._waiting += 1
        try:
            row = await self._boot(owner, spec, container, asyncio.get_running_loop().time() + wait_s)
        finally:
            self._waiting -= 1
        try:
            sandbox = await self.registry.attach(row)
            # The working folder may be missing in the image; `docker run -w` creates it, too.
            await sandbox.exec('mkdir -p -- "$FOLDER"', env={"FOLDER": container.cwd}, cwd="/", timeout_s=_SET_UP_S)
        except BaseException:
            self.registry.tasks.start(self.destroy(row))
            raise
        return row

    async def _boot(self, owner: Owner, spec: SandboxSpec, container: Container, deadline_s: float) -> LeasedSandbox:
        while True:
            try:
                if len(self.registry.table.rows()) >= MAX_CONTAINERS:
                    # Listing removes rows of dead sandboxes.
                    await self.registry.list(owner)
                    if len(self.registry.table.rows()) >= MAX_CONTAINERS:
                        raise CapacityExceeded(f"all {MAX_CONTAINERS} containers are in use")
                return await self.registry.create(owner, spec, container)
            except CapacityExceeded as error:
                rest_s = deadline_s - asyncio.get_running_loop().time()
                if rest_s <= 0:
                    raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(rest_s, max(0.05, error.retry_after_s))), self._ended:
                        await self._ended.wait()

    async def destroy(self, row: LeasedSandbox) -> None:
        """Kill a container. Idempotent. Raises SandboxError."""
        await self.registry.kill(row)
        self._busy_until.pop(row.id, None)
        async with self._ended:
            self._ended.notify_all()

    # Use

    async def renew(self, row: LeasedSandbox) -> Sandbox:
        """Renew the lease of a container and return its sandbox. Raises SandboxGone."""
        sandbox = await self.registry.attach(row)
        now = asyncio.get_running_loop().time()
        until = max(self._busy_until.get(row.id, []), default=now)
        try:
            await sandbox.renew(self.lease_s + max(0.0, until - now))
        except SandboxGone:
            self.registry.table.drop(row.id)
            raise
        return sandbox

    @asynccontextmanager
    async def busy(self, row: LeasedSandbox, for_s: float) -> AsyncIterator[Sandbox]:
        """Extend a container's lease so that it ends `lease_s` seconds after an operation of at most `for_s`
        seconds."""
        until = asyncio.get_running_loop().time() + for_s
        self._busy_until.setdefault(row.id, []).append(until)
        try:
            yield await self.renew(row)
        finally:
            times = self._busy_until.get(row.id, [])
            if until in times:
                times.remove(until)
            if not times:
                self._busy_until.pop(row.id, None)
            # The result of the operation matters more; the next request detects a dead container.
            with suppress(SandboxError):
                await self.renew(row)


def new_container(cwd: str, *, lease: bool = False, instance_id: str = "", prefix: str = "swe") -> Container:
    return Container(
        name=f"{prefix}-{secrets.token_hex(6)}",
        cwd=cwd,
        created_at=time.time(),
        lease_id=f"swe-lease-{secrets.token_hex(8)}" if lease else "",
        instance_id=instance_id,
    )
