"""The sandboxes that this server lends: made by key, found by id, ended.

Invariants:
- What the provider lists is what there is; labels on its sandboxes say whose they are, so a list needs no table.
- The same key of an owner makes one sandbox, whoever asks at the same time, again, or after a restart. A create without
  a key ends with the request that asked.
- An owner names only images of the map and snapshots of its own, and mounts only sandboxes of its own.
- Boots wait in a bounded queue; kills, renewals and lists never wait for a boot.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.base import FrozenMount, ImageRef, SandboxId, SandboxInfo, SandboxSpec
from headrace.sandboxes.errors import CapacityExceeded, SandboxError, SandboxGone, SpecRefused
from headrace.serve.e2b_sandboxes.boot_queue import BootQueue
from headrace.serve.exec.store import LeasedSandbox

if TYPE_CHECKING:
    import builtins

    from headrace.sandboxes.base import Sandbox, SandboxProvider
    from headrace.sandboxes.remote.tasks import ServerTasks
    from headrace.serve.e2b_sandboxes.images import ImageMap
    from headrace.serve.e2b_sandboxes.keys import Owner
    from headrace.serve.exec.store import Container, LeasedSandboxTable

_LABELS: Final = "exec_server."
_OWNER, _KEY, _API = f"{_LABELS}owner", f"{_LABELS}key", f"{_LABELS}api"
_QUOTA_RETRY_S: Final = 1.0
HOST_IMAGE: Final = "host"

logger = logging.getLogger(__name__)


class Registry:
    """One for each API of a server, which is told apart by `api`; they share provider and table."""

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

    # Finding

    def find(self, sandbox: str) -> LeasedSandbox:
        """Raises SandboxGone."""
        row = self.table.get(sandbox)
        if row is None:
            raise SandboxGone(f"sandbox {sandbox[:80]} is not here: killed, expired, or never made")
        return row

    async def attach(self, row: LeasedSandbox) -> Sandbox:
        return await self.provider.attach(row.ref)

    async def list(self, owner: Owner) -> builtins.list[SandboxInfo]:
        """The owner's. Forgets rows of what is gone. Raises SandboxError."""
        known = set(self.table.rows())
        infos = await self.provider.list()
        alive = {info.id for info in infos}
        for row in known:
            # A row that was written during the question is not in `known`.
            if row.id not in alive:
                self.table.drop(row.id)
        return [_shown(info) for info in infos if self._is_of(info, owner)]

    def _is_of(self, info: SandboxInfo, owner: Owner) -> bool:
        return info.labels.get(_OWNER) == owner.name and info.labels.get(_API) == self._api

    # Making

    async def create(self, owner: Owner, spec: SandboxSpec, container: Container | None = None) -> LeasedSandbox:
        """Raises SandboxError."""
        snapshots = {image: image for image in self.table.snapshots(owner.name).values()}
        image = HOST_IMAGE if spec.image == HOST_IMAGE else self.images.resolve(spec.image, {}, snapshots)
        key = spec.idempotency_key
        labels = {**spec.labels, _OWNER: owner.name, _KEY: key, _API: self._api}
        named = replace(spec, image=image, labels=labels, idempotency_key=self._boot_key(owner, key))
        self._check_mounts(owner, spec.mounts)
        await self._check_quota(owner)
        if not key:
            # In the request's own task: a client that leaves cancels the boot, and nothing stays.
            return await self._boot(owner, named, spec.image, container)
        boot = self._booting.get((owner.name, key))
        if boot is None:
            boot = self._booting[owner.name, key] = _Boot()
            boot.result = self.tasks.share(self._boot_shared(owner, key, boot, (named, spec.image, container)))
        assert boot.result is not None
        return await asyncio.shield(boot.result)

    def _boot_key(self, owner: Owner, key: str) -> str:
        if not key:
            return f"{self._api}-{secrets.token_hex(16)}"
        return f"{self._api}-{hashlib.sha256(f'{owner.name}:{key}'.encode()).hexdigest()[:40]}"

    async def _boot_shared(
        self, owner: Owner, key: str, boot: _Boot, order: tuple[SandboxSpec, str, Container | None]
    ) -> LeasedSandbox:
        boot.task = asyncio.current_task()
        try:
            return await self._boot(owner, *order)
        finally:
            self._booting.pop((owner.name, key), None)

    async def _boot(self, owner: Owner, spec: SandboxSpec, image: str, container: Container | None) -> LeasedSandbox:
        async with self._queue:
            ref = await self.provider.create(spec)
        known = self.table.get(ref.id)
        if known is not None:
            return known
        secret = secrets.token_hex(32)
        row = LeasedSandbox(id=ref.id, owner=owner.name, secret=secret, ref=ref, image=image, container=container)
        self.table.put(row)
        return row

    def _check_mounts(self, owner: Owner, mounts: tuple[FrozenMount, ...]) -> None:
        for mount in mounts:
            row = self.table.get(mount.source)
            if row is None or row.owner != owner.name:
                raise SpecRefused(f"mounts: there is no frozen sandbox {mount.source[:80]}")

    async def _check_quota(self, owner: Owner) -> None:
        most = owner.max_sandboxes
        if most is None:
            return
        used = len(await self.list(owner)) + sum(name == owner.name for name, _ in self._booting)
        if used >= most:
            raise CapacityExceeded(f"key {owner.name!r} has reached its {most} concurrent sandboxes", _QUOTA_RETRY_S)

    # Ending

    async def kill(self, row: LeasedSandbox) -> None:
        """Idempotent; runs to its end though the client leaves. Raises SandboxError."""
        await asyncio.shield(self.tasks.share(self._kill(row)))

    async def _kill(self, row: LeasedSandbox) -> None:
        await (await self.attach(row)).kill()
        self.table.drop(row.id)

    async def destroy(self, owner: Owner, sandbox: str) -> None:
        """Kill by id alone, what `list` shows to this owner. Idempotent. Raises SandboxError."""
        row = self.table.get(sandbox)
        if row is not None:
            if row.owner == owner.name:
                await self.kill(row)
            return
        if any(info.id == sandbox for info in await self.list(owner)):
            await self.provider.destroy(SandboxId(sandbox))

    async def discard(self, owner: Owner, key: str) -> None:
        """Nothing of this key stays: its boot is broken off, its sandbox killed. Idempotent. Raises SandboxError."""
        boot = self._booting.get((owner.name, key))
        if boot is not None and boot.task is not None:
            boot.task.cancel()
            await asyncio.wait((boot.task,))
        for info in await self.list(owner):
            if info.idempotency_key == key:
                await self.destroy(owner, info.id)

    async def snapshot(self, row: LeasedSandbox) -> ImageRef:
        """The image; the same one when it is asked for again, when the sandbox is gone. Raises SandboxError."""
        done = self.table.snapshots(row.owner).get(row.id)
        if done is not None:
            return ImageRef(done)
        image = await (await self.attach(row)).snapshot()
        self.table.put_snapshot(image, row.owner, row.id)
        return image

    async def end_all(self) -> None:
        """What cannot be ended now ends with its lease."""
        async with asyncio.TaskGroup() as group:
            for row in self.table.rows():
                group.create_task(self._end(row))

    async def _end(self, row: LeasedSandbox) -> None:
        with suppress(SandboxError):
            await self._kill(row)


class _Boot:
    """A keyed create that goes on."""

    def __init__(self) -> None:
        self.result: asyncio.Future[LeasedSandbox] | None = None
        self.task: asyncio.Task[None] | asyncio.Task[object] | None = None


def _shown(info: SandboxInfo) -> SandboxInfo:
    """As its client knows it."""
    labels = {name: value for name, value in info.labels.items() if not name.startswith(_LABELS)}
    return replace(info, labels=labels, idempotency_key=info.labels.get(_KEY, ""))
