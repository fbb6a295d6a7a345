"""The sandboxes of a server: made, kept until their time, paused, ended; and found again after a restart.

Invariants:
- Every sandbox belongs to one owner; to every other it is not there.
- A row stands in the table from before its boot to after its death. The provider's own lease ends a while after the
  row's time, so a server that never comes back leaves nothing for long.
- The same Idempotency-Key of an owner makes one sandbox, whoever asks at the same time or after a restart. A create
  without one whose client went away leaves nothing.
- What changes a sandbox's life holds its lock and runs to its end though the client leaves.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, Protocol

from headrace.sandboxes.base import Feature, SandboxSpec
from headrace.sandboxes.errors import SandboxError, TransientSandboxError
from headrace.serve.e2b_sandboxes.bodies import digest
from headrace.serve.e2b_sandboxes.boot_queue import BootQueue
from headrace.serve.e2b_sandboxes.errors import ApiError, not_found, not_running, unsupported
from headrace.serve.e2b_sandboxes.expiry import ExpiryClock
from headrace.serve.e2b_sandboxes.live_sandbox import LiveSandbox
from headrace.serve.e2b_sandboxes.table import Row, State

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable

    from headrace.sandboxes.base import Sandbox, SandboxInfo, SandboxRef
    from headrace.sandboxes.remote.tasks import ServerTasks
    from headrace.serve.e2b_sandboxes.bodies import NewSandbox
    from headrace.serve.e2b_sandboxes.images import ImageMap
    from headrace.serve.e2b_sandboxes.keys import Owner
    from headrace.serve.e2b_sandboxes.table import SandboxTable

ID_LABEL: Final = "e2b_sandbox"
OWNER_LABEL: Final = "e2b_owner"
LEASE_MARGIN_S: Final = 60.0
"""How long the provider's lease outlasts the sandbox's time: the server ends it first, the lease when it cannot."""
PAUSED_LEASE_S: Final = 7 * 24 * 3600.0
"""How long a paused sandbox is kept: nobody renews it."""
_QUOTA_RETRY_S: Final = 1.0

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What the server needs of a provider, or of a pool."""

    @property
    def features(self) -> frozenset[Feature]: ...

    async def create(self, spec: SandboxSpec) -> SandboxRef: ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def list(self) -> builtins.list[SandboxInfo]: ...


class Sandboxes:
    """All sandboxes of one server."""

    def __init__(self, backend: Backend, table: SandboxTable, images: ImageMap, tasks: ServerTasks) -> None:
        self.backend = backend
        self.table = table
        self.tasks = tasks
        self._images = images
        self._queue = BootQueue()
        self._live: dict[str, LiveSandbox] = {}
        self._booting: dict[str, _Boot] = {}
        self._clock = ExpiryClock(self._on_due)

    async def run(self) -> None:
        """End what is due, for as long as the server runs."""
        await self._clock.run()

    # Finding

    def rows(self, owner: Owner) -> builtins.list[Row]:
        return [live.row for live in self._live.values() if live.row.owner == owner.name and not live.ending]

    async def forget_lost(self) -> None:
        """Drop those that the provider has no more: they died by themselves. One that cannot tell changes nothing."""
        before = {live.row.ref: live for live in self._live.values()}
        try:
            alive = {info.id for info in await self.backend.list()}
        except TransientSandboxError as error:
            logger.warning("the provider cannot tell which sandboxes live: %s", error)
            return
        for ref, live in before.items():
            if ref is not None and ref.id not in alive and live.row.ref == ref and not live.changing.locked():
                self.forget(live)

    def get(self, owner: Owner, sandbox_id: str) -> LiveSandbox:
        """Raises ApiError 404."""
        live = self._live.get(sandbox_id)
        if live is None or live.ending or live.row.owner != owner.name:
            raise not_found(sandbox_id)
        return live

    def everything(self) -> builtins.list[LiveSandbox]:
        return list(self._live.values())

    def running(self) -> builtins.list[LiveSandbox]:
        return [live for live in self._live.values() if live.row.state is State.RUNNING and not live.ending]

    def running_one(self, sandbox_id: str) -> LiveSandbox:
        """For envd. Raises ApiError 502."""
        live = self._live.get(sandbox_id)
        if live is None or live.ending or live.row.state is not State.RUNNING:
            raise not_running(sandbox_id)
        return live

    # Making

    async def create(self, owner: Owner, order: NewSandbox, client_key: str, timeout_s: int) -> Row:
        """Boot a sandbox, or give the one of the same key. Raises ApiError, SandboxError."""
        if self._is_full(owner):
            await self.forget_lost()
        request_digest = digest(order)
        if client_key and (known := self._with_key(owner, client_key, request_digest)) is not None:
            return await known
        snapshots = {one.id: one.image for one in self.table.snapshots(owner.name)}
        image = self._images.resolve(order.template_id, order.metadata, snapshots)
        self._check_quota(owner)
        row = _new_row(owner, order, image, timeout_s, client_key, request_digest)
        boot = self._booting[row.id] = _Boot(row)
        if not client_key:
            # In the request's own task: a client that leaves cancels the boot, and nothing stays.
            return await self._boot(row)
        boot.result = self.tasks.share(self._boot(row))
        return await asyncio.shield(boot.result)

    def _with_key(self, owner: Owner, client_key: str, request_digest: str) -> Awaitable[Row] | None:
        rows = self.rows(owner) + [boot.row for boot in self._booting.values()]
        for row in rows:
            if row.owner != owner.name or row.client_key != client_key:
                continue
            if not compare_digest(row.request_digest, request_digest):
                message = "this Idempotency-Key was used for another request"
                raise ApiError(422, message, error_code="idempotency_request_mismatch")
            boot = self._booting.get(row.id)
            return _ready(row) if boot is None or boot.result is None else asyncio.shield(boot.result)
        return None

    def _check_quota(self, owner: Owner) -> None:
        if self._is_full(owner):
            message = f"key {owner.name!r} has reached its {owner.max_sandboxes} concurrent sandboxes"
            raise ApiError(429, message, retry_after_s=_QUOTA_RETRY_S)

    def _is_full(self, owner: Owner) -> bool:
        used = len(self.rows(owner)) + sum(boot.row.owner == owner.name for boot in self._booting.values())
        return owner.max_sandboxes is not None and used >= owner.max_sandboxes

    async def _boot(self, row: Row) -> Row:
        try:
            async with self._queue:
                self.table.put(row)
                ref = await self.backend.create(spec_of(row))
                now = time.time()
                row = replace(row, ref=ref, state=State.RUNNING, started_at=now, end_at=now + row.timeout_s)
                await self.adopt(row, ref)
        except BaseException:
            self.table.drop(row.id)
            raise
        finally:
            self._booting.pop(row.id, None)
        return row

    async def adopt(self, row: Row, ref: SandboxRef) -> LiveSandbox:
        """Serve a sandbox that exists."""
        live = self._live[row.id] = LiveSandbox(row, await self.backend.attach(ref))
        self.update(live, row)
        live.note(f"sandbox started from template {row.template}")
        return live

    # Changing and ending

    def update(self, live: LiveSandbox, row: Row) -> None:
        """Write a row that changed; its time counts from now on."""
        live.row = row
        self.table.put(row)
        if row.state is State.RUNNING:
            self._clock.set(row.id, row.end_at)
        else:
            self._clock.drop(row.id)

    async def kill(self, live: LiveSandbox) -> None:
        """End it, whatever becomes of the request. Raises SandboxError."""
        await asyncio.shield(self.tasks.share(self._kill(live)))

    async def _kill(self, live: LiveSandbox, *, only_if_due: bool = False) -> None:
        async with live.changing:
            if only_if_due and live.row.end_at > time.time():
                return
            live.ending = True
            try:
                await live.handle.kill()
            except BaseException:
                live.ending = False
                raise
            self.forget(live)

    def forget(self, live: LiveSandbox) -> None:
        """It is dead."""
        if self._live.pop(live.row.id, None) is None:
            return
        self._clock.drop(live.row.id)
        self.table.drop(live.row.id)
        live.close()

    def _on_due(self, sandbox_id: str) -> None:
        if (live := self._live.get(sandbox_id)) is not None:
            self.tasks.start(self._expire(live))

    async def _expire(self, live: LiveSandbox) -> None:
        try:
            if live.row.pause_at_end and Feature.PAUSE in self.backend.features:
                await self.pause(live, only_if_due=True)
            else:
                await self._kill(live, only_if_due=True)
        except SandboxError as error:
            # The provider's lease ends it a little later.
            logger.warning("sandbox %s could not be ended at its time: %s", live.row.id, error)
            self.forget(live)

    async def pause(self, live: LiveSandbox, *, only_if_due: bool = False) -> None:
        """Stop its processes; its time does not run. Raises ApiError 409, SandboxError."""
        async with live.changing:
            if only_if_due and live.row.end_at > time.time():
                return
            if live.row.state is State.PAUSED:
                raise ApiError(409, f"sandbox {live.row.id!r} is already paused")
            if Feature.PAUSE not in self.backend.features:
                raise unsupported("pause")
            await live.handle.renew(PAUSED_LEASE_S)
            try:
                await live.handle.pause()
            except SandboxError:
                rest_s = max(0.0, live.row.end_at - time.time())
                await live.handle.renew(rest_s + LEASE_MARGIN_S)
                raise
            self.update(live, replace(live.row, state=State.PAUSED))
            live.note("sandbox paused")

    async def resume(self, live: LiveSandbox, timeout_s: float) -> bool:
        """Let it go on for `timeout_s`; False when it runs already. Raises SandboxError."""
        async with live.changing:
            if live.row.state is State.RUNNING:
                return False
            await live.handle.renew(timeout_s + LEASE_MARGIN_S)
            await live.handle.resume()
            now = time.time()
            changed = replace(live.row, state=State.RUNNING, timeout_s=timeout_s, end_at=now + timeout_s)
            self.update(live, changed)
            live.note("sandbox resumed")
            return True

    async def set_timeout(self, live: LiveSandbox, timeout_s: float, *, only_longer: bool = False) -> None:
        """Let it end `timeout_s` from now. Raises SandboxError."""
        async with live.changing:
            end_at = time.time() + timeout_s
            if live.row.state is not State.RUNNING or (only_longer and end_at <= live.row.end_at):
                return
            await live.handle.renew(timeout_s + LEASE_MARGIN_S)
            self.update(live, replace(live.row, timeout_s=timeout_s, end_at=end_at))


@dataclass(slots=True)
class _Boot:
    """A create that goes on; `result` where others may wait for it."""

    row: Row
    result: asyncio.Future[Row] | None = None


async def _ready(row: Row) -> Row:
    return row


def _new_row(owner: Owner, order: NewSandbox, image: str, timeout_s: int, client_key: str, request_digest: str) -> Row:
    sandbox_id = f"i{secrets.token_hex(10)}"
    chosen_s = float(timeout_s if order.timeout is None else order.timeout)
    named = hashlib.sha256(f"{owner.name}:{client_key}".encode()).hexdigest()[:40]
    return Row(
        id=sandbox_id,
        owner=owner.name,
        boot_key=f"e2b-{named}" if client_key else sandbox_id,
        template=order.template_id,
        image=image,
        access_token=secrets.token_hex(32),
        timeout_s=chosen_s,
        started_at=time.time(),
        end_at=time.time() + chosen_s,
        pause_at_end=order.auto_pause,
        metadata=dict(order.metadata),
        env=dict(order.env_vars),
        client_key=client_key,
        request_digest=request_digest,
    )


def spec_of(row: Row) -> SandboxSpec:
    """What the provider is asked for."""
    return SandboxSpec(
        image=row.image,
        ttl_s=row.timeout_s + LEASE_MARGIN_S,
        idempotency_key=row.boot_key,
        labels={ID_LABEL: row.id, OWNER_LABEL: row.owner},
    )
