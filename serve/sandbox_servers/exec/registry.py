"""Registry of the sandboxes that a server leases to its clients.

Invariants:
- The provider's list is authoritative; labels on its sandboxes name their owners, so listing them needs no table.
- Requests of one owner with the same key create only one sandbox, even if they are concurrent or repeated or arrive
  after a restart. A create without a key is cancelled with its request.
- An owner can use only images in the map, its own snapshots, and mounts of its own sandboxes.
- Boots wait in a bounded queue; kills, renewals and lists never wait for a boot.
- A row is written before a client gets its sandbox, so a restarted server knows all leased sandboxes. A sandbox that
  has no row after a crash ends when its lease expires, or is found by its key.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from headrace.sandboxes.base import ImageRef, Sandbox, SandboxId, SandboxInfo, SandboxProvider, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import CapacityExceeded, SandboxError, SandboxGone, SpecRefused
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b_state.images import LEAST_PATIENCE_S, BootQueue, ImageMap, prepare_image
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.table import opening

_LABELS: Final = "exec_server."
_OWNER, _KEY, _API = f"{_LABELS}owner", f"{_LABELS}key", f"{_LABELS}api"
_QUOTA_RETRY_S: Final = 1.0
HOST_IMAGE: Final = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Additional properties that the drop-in contract gives a sandbox; `created_at` is in Unix seconds."""

    name: str
    cwd: str
    created_at: float
    lease_id: str = ""
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSandbox:
    """One leased sandbox. `secret` grants access to it through this server; `ref` is the provider's reference."""

    id: SandboxId
    owner: str
    secret: str = field(repr=False)
    ref: SandboxRef
    image: str
    container: Container | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSnapshot:
    """An image made of the sandbox `source`."""

    owner: str
    source: SandboxId
    image: str


class LeasedSandboxTable:
    """Leased sandboxes in memory and on disk, and the snapshots; the caller must `close` it."""

    def __init__(self, folder: Path | None) -> None:
        """Open the tables. Raises SpecRefused if the folder is unusable or another server uses it."""
        with opening(folder, "lent.db") as self._file:
            self._lent = self._file.table("lent", LeasedSandbox, "id")
            self.snapshots = self._file.table("snapshots", TakenSnapshot, "owner", "source")
            # Each request looks one up, by its container's name in all of them.
            self._rows = {row.id: row for row in self._lent.all()}

    def put(self, row: LeasedSandbox) -> None:
        self._rows[row.id] = row
        self._lent.put(row)

    def get(self, sandbox: str) -> LeasedSandbox | None:
        return self._rows.get(SandboxId(sandbox))

    def drop(self, sandbox: str) -> None:
        """Remove a row. Idempotent."""
        if self._rows.pop(SandboxId(sandbox), None) is not None:
            self._lent.drop(sandbox)

    def rows(self) -> list[LeasedSandbox]:
        return list(self._rows.values())

    def close(self) -> None:
        self._file.close()


class SandboxRegistry:
    """The sandboxes that belong to one API of a server; their label `api` names the API. Registries share the provider
    and the table."""

    def __init__(
        self, provider: SandboxProvider, table: LeasedSandboxTable, images: ImageMap, tasks: ServerTasks, *, api: str
    ) -> None:
        self.provider = provider
        self.table = table
        self.tasks = tasks
        self.images = images
        self._api = api
        self._queue = BootQueue()
        self._booting: dict[tuple[str, str], _Boot] = {}

    # Look-up

    def find(self, sandbox: str) -> LeasedSandbox:
        """Return a sandbox's row. Raises SandboxGone."""
        row = self.table.get(sandbox)
        if row is None:
            raise SandboxGone(f"sandbox {sandbox[:80]} does not exist: killed, expired, or never created")
        return row

    async def attach(self, row: LeasedSandbox) -> Sandbox:
        return await self.provider.attach(row.ref)

    async def list(self, owner: Owner) -> builtins.list[SandboxInfo]:
        """Return an owner's sandboxes, and drop the rows of dead ones. Raises SandboxError."""
        known = set(self.table.rows())
        infos = await self.provider.list()
        alive = {info.id for info in infos}
        for row in known:
            # A row that was written since the query began is not in `known`.
            if row.id not in alive:
                self.table.drop(row.id)
        found = []
        for info in infos:
            if info.labels.get(_OWNER) == owner.name and info.labels.get(_API) == self._api:
                labels = {name: value for name, value in info.labels.items() if not name.startswith(_LABELS)}
                found.append(replace(info, labels=labels, idempotency_key=info.labels.get(_KEY, "")))
        return found

    # Creation

    async def create(self, owner: Owner, spec: SandboxSpec, container: Container | None = None) -> LeasedSandbox:
        """Create a sandbox, or return the one with the same key. Raises SandboxError."""
        snapshots = {one.image: one.image for one in self.table.snapshots.all(owner.name)}
        image = HOST_IMAGE if spec.image == HOST_IMAGE else self.images.resolve(spec.image, {}, snapshots)
        key = spec.idempotency_key
        labels = {**spec.labels, _OWNER: owner.name, _KEY: key, _API: self._api}
        suffix = hashlib.sha256(f"{owner.name}:{key}".encode()).hexdigest()[:40] if key else secrets.token_hex(16)
        spec = owner.ceilings.applied_to(spec, owner.name)
        named = replace(spec, image=image, labels=labels, idempotency_key=f"{self._api}-{suffix}")
        for mount in spec.mounts:
            known = self.table.get(mount.source)
            if known is None or known.owner != owner.name:
                raise SpecRefused(f"mounts: there is no frozen sandbox {mount.source[:80]}")
        if (most := owner.max_sandboxes) is not None:
            used = len(await self.list(owner)) + sum(name == owner.name for name, _ in self._booting)
            if used >= most:
                text = f"key {owner.name!r} has reached its limit of {most} concurrent sandboxes"
                raise CapacityExceeded(text, _QUOTA_RETRY_S)
        if not key:
            # In the request's own task: a client that disconnects cancels the boot, which then leaves nothing.
            return await self._boot(owner, named, spec.image, container)
        boot = self._booting.get((owner.name, key))
        if boot is None:
            boot = self._booting[owner.name, key] = _Boot()
            boot.result = self.tasks.share(self._boot_shared(owner, key, boot, (named, spec.image, container)))
        assert boot.result is not None
        return await asyncio.shield(boot.result)

    async def _boot_shared(
        self, owner: Owner, key: str, boot: _Boot, order: tuple[SandboxSpec, str, Container | None]
    ) -> LeasedSandbox:
        boot.task = asyncio.current_task()
        try:
            return await self._boot(owner, *order)
        finally:
            self._booting.pop((owner.name, key), None)

    async def _boot(self, owner: Owner, spec: SandboxSpec, image: str, container: Container | None) -> LeasedSandbox:
        await prepare_image(self.provider, spec.image, max(spec.ttl_s, LEAST_PATIENCE_S))
        async with self._queue:
            ref = await self.provider.create(spec)
        known = self.table.get(ref.id)
        if known is not None:
            return known
        secret = secrets.token_hex(32)
        row = LeasedSandbox(id=ref.id, owner=owner.name, secret=secret, ref=ref, image=image, container=container)
        self.table.put(row)
        return row

    # End

    async def kill(self, row: LeasedSandbox) -> None:
        """Kill a sandbox, even if the client disconnects in the meantime. Idempotent. Raises SandboxError."""
        await asyncio.shield(self.tasks.share(self._kill(row)))

    async def _kill(self, row: LeasedSandbox) -> None:
        await (await self.attach(row)).kill()
        self.table.drop(row.id)

    async def destroy(self, owner: Owner, sandbox: str) -> None:
        """Kill one of this owner's sandboxes by its id alone. Idempotent. Raises SandboxError."""
        row = self.table.get(sandbox)
        if row is not None:
            if row.owner == owner.name:
                await self.kill(row)
            return
        if any(info.id == sandbox for info in await self.list(owner)):
            await self.provider.destroy(SandboxId(sandbox))

    async def discard(self, owner: Owner, key: str) -> None:
        """Cancel the boot with this key, or kill its sandbox. Idempotent. Raises SandboxError."""
        boot = self._booting.get((owner.name, key))
        if boot is not None and boot.task is not None:
            boot.task.cancel()
            await asyncio.wait((boot.task,))
        for info in await self.list(owner):
            if info.idempotency_key == key:
                await self.destroy(owner, info.id)

    async def snapshot(self, row: LeasedSandbox) -> ImageRef:
        """Make an image of a sandbox and end the sandbox; a repeated call returns the same image. Raises
        SandboxError."""
        done = self.table.snapshots.get(row.owner, row.id)
        if done is not None:
            return ImageRef(done.image)
        image = await (await self.attach(row)).snapshot()
        self.table.snapshots.put(TakenSnapshot(owner=row.owner, source=row.id, image=image))
        return image

    async def end_all(self) -> None:
        """Kill all sandboxes. Those that cannot be killed now end when their lease expires."""

        async def end(row: LeasedSandbox) -> None:
            with suppress(SandboxError):
                await self._kill(row)

        async with asyncio.TaskGroup() as group:
            for row in self.table.rows():
                group.create_task(end(row))


class _Boot:
    """A running create with a key."""

    def __init__(self) -> None:
        self.result: asyncio.Future[LeasedSandbox] | None = None
        self.task: asyncio.Task[None] | asyncio.Task[object] | None = None
