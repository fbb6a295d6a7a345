"""Sandboxes as the drop-in contract knows them: containers with a lease that any word about them renews.

Invariants:
- A container that nobody speaks of for `lease_s` ends, whatever becomes of this server: the lease is the provider's.
- While a command runs, its container's lease covers the command's time.
- Who finds no room waits, in a bounded queue, for one that ends; after its own time it is told when to come again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import CapacityExceeded, SandboxError, SandboxGone
from headrace.serve.exec.store import Container

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.sandboxes.base import Sandbox
    from headrace.serve.e2b_sandboxes.keys import Owner
    from headrace.serve.exec.registry import Registry
    from headrace.serve.exec.store import LeasedSandbox

MAX_CONTAINERS: Final = 512
MAX_WAITING: Final = 4096
_SET_UP_S: Final = 60.0


class Containers:
    """Those of one server."""

    def __init__(self, registry: Registry, lease_s: float) -> None:
        self.registry = registry
        self.lease_s = lease_s
        self._busy_until: dict[str, list[float]] = {}
        self._ended = asyncio.Condition()
        self._waiting = 0

    def all(self, owner: Owner) -> list[tuple[LeasedSandbox, Container]]:
        rows = self.registry.table.rows()
        return [(row, row.container) for row in rows if row.container is not None and row.owner == owner.name]

    def find(self, owner: Owner, container: str) -> LeasedSandbox:
        """By id or name. Raises SandboxGone."""
        for row, known in self.all(owner):
            if container in (row.id, known.name):
                return row
        raise SandboxGone(f"no container {container[:80]}: destroyed, expired, or never made")

    def find_lease(self, owner: Owner, lease_id: str) -> LeasedSandbox:
        """Raises SandboxGone."""
        for row, known in self.all(owner):
            if lease_id and known.lease_id == lease_id:
                return row
        raise SandboxGone(f"Unknown lease_id: {lease_id[:80]}")

    # Making and ending

    async def create(self, owner: Owner, image: str, container: Container, *, key: str, wait_s: float) -> LeasedSandbox:
        """Raises SandboxError; CapacityExceeded when `wait_s` is over."""
        if self._waiting >= MAX_WAITING:
            raise CapacityExceeded(f"{self._waiting} containers wait for room")
        spec = SandboxSpec(image=image, ttl_s=self.lease_s, idempotency_key=key, labels={"container": container.name})
        self._waiting += 1
        try:
            row = await self._make(owner, spec, container, asyncio.get_running_loop().time() + wait_s)
        finally:
            self._waiting -= 1
        await self._set_up(row)
        return row

    async def _make(self, owner: Owner, spec: SandboxSpec, container: Container, deadline_s: float) -> LeasedSandbox:
        while True:
            try:
                await self._check_room(owner)
                return await self.registry.create(owner, spec, container)
            except CapacityExceeded as error:
                rest_s = deadline_s - asyncio.get_running_loop().time()
                if rest_s <= 0:
                    raise
                await self._wait_for_end(min(rest_s, max(0.05, error.retry_after_s)))

    async def _check_room(self, owner: Owner) -> None:
        if len(self.registry.table.rows()) < MAX_CONTAINERS:
            return
        await self.registry.list(owner)
        if len(self.registry.table.rows()) >= MAX_CONTAINERS:
            raise CapacityExceeded(f"all {MAX_CONTAINERS} containers are taken")

    async def _wait_for_end(self, most_s: float) -> None:
        try:
            async with asyncio.timeout(most_s), self._ended:
                await self._ended.wait()
        except TimeoutError:
            return

    async def _set_up(self, row: LeasedSandbox) -> None:
        """The working folder is there, as `docker run -w` sees to it."""
        assert row.container is not None
        try:
            sandbox = await self.registry.attach(row)
            await sandbox.exec('mkdir -p -- "$FOLDER"', env={"FOLDER": row.container.cwd}, cwd="/", timeout_s=_SET_UP_S)
        except BaseException:
            self.registry.tasks.start(self.destroy(row))
            raise

    async def destroy(self, row: LeasedSandbox) -> None:
        """Idempotent. Raises SandboxError."""
        await self.registry.kill(row)
        self._busy_until.pop(row.id, None)
        async with self._ended:
            self._ended.notify_all()

    # Using

    async def renew(self, row: LeasedSandbox) -> Sandbox:
        """Somebody spoke of it. Raises SandboxGone."""
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
        """A time in which its lease does not end, and `lease_s` after it."""
        until = asyncio.get_running_loop().time() + for_s
        self._busy_until.setdefault(row.id, []).append(until)
        try:
            yield await self.renew(row)
        finally:
            await self._rest(row, until)

    async def _rest(self, row: LeasedSandbox, until: float) -> None:
        times = self._busy_until.get(row.id, [])
        if until in times:
            times.remove(until)
        if not times:
            self._busy_until.pop(row.id, None)
        try:
            await self.renew(row)
        except SandboxError:
            # The result of the work is what counts; a dead container is found out by the next request.
            return


def new_container(cwd: str, *, lease: bool = False, instance_id: str = "", prefix: str = "swe") -> Container:
    return Container(
        name=f"{prefix}-{secrets.token_hex(6)}",
        cwd=cwd,
        created_at=time.time(),
        lease_id=f"swe-lease-{secrets.token_hex(8)}" if lease else "",
        instance_id=instance_id,
    )
