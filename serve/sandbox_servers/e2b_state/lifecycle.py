"""Life cycle of a server's sandboxes: creation, expiry, pause, resume and termination.

Invariants:
- Every sandbox belongs to one owner and is invisible to all others.
- A sandbox has a row in the table from before its boot until after its death. The provider's lease ends shortly after
  the sandbox's own timeout, so even if the server crashes and is never restarted, no sandbox remains for long.
- Requests of one owner with the same Idempotency-Key create only one sandbox, even if they are concurrent or arrive
  after a restart. A create without a key leaves nothing behind if its client disconnects.
- A state change of a sandbox holds its lock and is completed even if the client disconnects.
- Deadlines are in Unix seconds, because they survive restarts and are shown to clients.
- After a restart, the provider's list is authoritative: live sandboxes are adopted, overdue ones ended and dead ones
  forgotten. An interrupted boot is found by its idempotency key; its sandbox is adopted if the client can repeat the
  request with a key of its own, and killed otherwise.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Final

from headrace.sandboxes.base import Feature, Guest, SandboxProvider, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxError, TransientSandboxError
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b_state.bodies import NewSandbox, digest
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, not_found, not_running, unsupported
from headrace.serve.sandbox_servers.e2b_state.images import LEAST_PATIENCE_S, BootQueue, ImageMap, prepare_image
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox
from headrace.serve.sandbox_servers.e2b_state.table import SandboxRow, SandboxTables, State
from headrace.serve.sandbox_servers.e2b_state.template_table import TemplateTable

ID_LABEL: Final = "e2b_sandbox"
OWNER_LABEL: Final = "e2b_owner"
LEASE_MARGIN_S: Final = 60.0
"""Time by which the provider's lease exceeds the sandbox's timeout, at which the server normally ends the sandbox."""
PAUSED_LEASE_S: Final = 7 * 24 * 3600.0
"""Lease of a paused sandbox, which is not renewed."""
_QUOTA_RETRY_S: Final = 1.0
NO_SUDO: Final = "headrace_sudo"
"""Metadata key: with the value `no`, the sandbox has no `sudo`."""
_USER: Final = "user"
_FILES: Final = "/run/e2b"
"""Folder of the files with the values of `SandboxRow.base_env`."""
READY_S: Final = 60.0
"""Time that the start command of a template is given until its ready command succeeds."""
IMAGE: Final = "image:"
"""Prefix of references to images of the catalogue (sandboxes.images.catalog)."""

logger = logging.getLogger(__name__)


class ExpiryClock:
    """Clock that calls `on_due(name)` at each deadline while `run` is running."""

    def __init__(self, on_due: Callable[[str], None]) -> None:
        self._deadlines = Deadlines()
        self._on_due = on_due
        self._changed = asyncio.Event()

    def set(self, name: str, at: float) -> None:
        self._deadlines.set(name, at)
        self._changed.set()

    def drop(self, name: str) -> None:
        self._deadlines.drop(name)

    async def run(self) -> None:
        while True:
            now = time.time()
            for name in self._deadlines.pop_due(now):
                self._on_due(name)
            at = self._deadlines.next()
            self._changed.clear()
            try:
                # At most an hour, after which a wall clock that was set forward is noticed.
                async with asyncio.timeout(3600.0 if at is None else min(3600.0, max(0.0, at - time.time()))):
                    await self._changed.wait()
            except TimeoutError:
                continue


class Sandboxes:
    """All sandboxes of one server."""

    def __init__(
        self,
        backend: SandboxProvider,
        tables: SandboxTables,
        images: ImageMap,
        tasks: ServerTasks,
        *,
        sudo: bool = True,
        defaults: SandboxLimits | None = None,
    ) -> None:
        self.backend = backend
        self.domain = ""
        """Domain of the host names of ports."""
        self.defaults = defaults or SandboxLimits()
        """The provider's limits of a sandbox that asks for none."""
        self._sudo = sudo
        self.tables = tables
        self.tasks = tasks
        self._images = images
        self._queue = BootQueue()
        self._live: dict[str, LiveSandbox] = {}
        self._booting: dict[str, _Boot] = {}
        self.builds: Counter[str] = Counter()
        """Running builds of templates by owner, each of which counts as a sandbox."""
        self.built: TemplateTable | None = None
        """The templates that creates can name besides the image map, if this server builds any."""
        self._clock = ExpiryClock(self._on_due)

    async def run(self) -> None:
        """End expired sandboxes for as long as the server is running."""
        await self._clock.run()

    # Look-up

    def rows(self, owner: Owner) -> builtins.list[SandboxRow]:
        return [live.row for live in self._live.values() if live.row.owner == owner.name and not live.ending]

    async def forget_lost(self) -> None:
        """Forget the sandboxes that have died on their own, unless the provider is unreachable."""
        before = {live.row.ref: live for live in self._live.values()}
        try:
            alive = {info.id for info in await self.backend.list()}
        except TransientSandboxError as error:
            logger.warning("the provider cannot list its sandboxes: %s", error)
            return
        for ref, live in before.items():
            if ref is not None and ref.id not in alive and live.row.ref == ref and not live.changing.locked():
                self.forget(live)

    def get(self, owner: Owner, sandbox_id: str) -> LiveSandbox:
        """Return one of an owner's sandboxes. Raises ApiError 404."""
        live = self._live.get(sandbox_id)
        if live is None or live.ending or live.row.owner != owner.name:
            raise not_found(sandbox_id)
        return live

    def all(self) -> builtins.list[LiveSandbox]:
        return list(self._live.values())

    def reachable(self) -> builtins.list[LiveSandbox]:
        """Return the sandboxes that are running, or that a request resumes."""
        return [live for live in self._live.values() if not live.ending and (live.runs or live.sleeps)]

    def sleeping_one(self, sandbox_id: str) -> LiveSandbox | None:
        """Return a sandbox that a request resumes, if it is one."""
        live = self._live.get(sandbox_id)
        return live if live is not None and live.sleeps and not live.ending else None

    async def wake(self, live: LiveSandbox) -> None:
        """Resume a sandbox that a request has found paused, for as long as its timeout was. Raises SandboxError."""
        if live.sleeps:
            await asyncio.shield(self.tasks.share(self.resume(live, live.row.timeout_s)))

    def running_one(self, sandbox_id: str) -> LiveSandbox:
        """Return a running sandbox, for envd. Raises ApiError 502."""
        live = self._live.get(sandbox_id)
        if live is None or live.ending or live.row.state is not State.RUNNING:
            raise not_running(sandbox_id)
        return live

    # Creation

    async def create(self, owner: Owner, order: NewSandbox, client_key: str, timeout_s: int) -> SandboxRow:
        """Boot a sandbox, or return the one with the same key. Raises ApiError, SandboxError."""
        owner.ceilings.check_lifetime(order.timeout or 0, owner.name)
        if self._is_full(owner):
            await self.forget_lost()
        request_digest = digest(order)
        rows = self.rows(owner) + [boot.row for boot in self._booting.values()] if client_key else []
        for row in rows:
            if row.owner != owner.name or row.client_key != client_key:
                continue
            if not compare_digest(row.request_digest, request_digest):
                message = "this Idempotency-Key was used for another request"
                raise ApiError(422, message, error_code="idempotency_request_mismatch")
            known = self._booting.get(row.id)
            return row if known is None or known.result is None else await asyncio.shield(known.result)
        snapshots = {one.id: one.image for one in self.tables.snapshots.all(owner.name)}
        built = None
        if self.built is not None and not self._images.names_image(order.template_id, order.metadata):
            built = self.built.find_build(owner.name, order.template_id)
        if built is None:
            image = self._images.resolve(order.template_id, order.metadata, snapshots)
        else:
            image = f"{IMAGE}{built.image}"
        self.check_quota(owner)
        row = _new_row(owner, order, image, timeout_s, client_key, request_digest)
        if Feature.GUEST in self.backend.features:
            sudo = self._sudo and order.metadata.get(NO_SUDO) != "no"
            row = replace(row, user=_USER, guest=True, sudo=sudo)
        if built is None:
            start, ready = self._images.commands_of(image)
            row = replace(row, start_command=start, ready_command=ready)
        else:
            row = replace(
                row,
                user=built.user or row.user,
                folder=built.folder,
                start_command=built.start_command,
                ready_command=built.ready_command,
            )
        boot = self._booting[row.id] = _Boot(row)
        if not client_key:
            # In the request's own task: a client that disconnects cancels the boot, which then leaves nothing.
            return await self._boot(row)
        boot.result = self.tasks.share(self._boot(row))
        return await asyncio.shield(boot.result)

    def check_quota(self, owner: Owner, *, own_build: bool = False) -> None:
        """Check that an owner may have one sandbox more; `own_build` is the check of a build that counts already.
        Raises ApiError 429."""
        if self._is_full(owner, besides=1 if own_build else 0):
            message = (
                f"key {owner.name!r} has reached its limit of {owner.max_sandboxes} concurrent sandboxes and builds"
            )
            raise ApiError(429, message, retry_after_s=_QUOTA_RETRY_S)

    def _is_full(self, owner: Owner, besides: int = 0) -> bool:
        used = len(self.rows(owner)) + sum(boot.row.owner == owner.name for boot in self._booting.values())
        used += self.builds[owner.name] - besides
        return owner.max_sandboxes is not None and used >= owner.max_sandboxes

    async def _boot(self, row: SandboxRow) -> SandboxRow:
        try:
            await prepare_image(self.backend, row.image, max(row.timeout_s, LEAST_PATIENCE_S))
            async with self._queue:
                self.tables.sandboxes.put(row)
                ref = await self.backend.create(spec_of(row))
                now = time.time()
                row = replace(row, ref=ref, state=State.RUNNING, started_at=now, end_at=now + row.timeout_s)
                live = await self.adopt(row, ref)
            if row.start_command or row.ready_command:
                await self._start(live)
        except BaseException:
            self.tables.sandboxes.drop(row.id)
            raise
        finally:
            self._booting.pop(row.id, None)
        return row

    async def _start(self, live: LiveSandbox) -> None:
        """Run the start command of a sandbox's template, and wait until its ready command succeeds; its clock is its
        own. A sandbox that does not become ready is killed. Raises BootTimeout, SandboxError."""
        try:
            await live.start(self.tasks, READY_S)
        except BaseException:
            with suppress(SandboxError):
                await self.kill(live)
            raise

    async def adopt(self, row: SandboxRow, ref: SandboxRef) -> LiveSandbox:
        """Start serving a sandbox that already exists."""
        live = self._live[row.id] = LiveSandbox(row, await self.backend.attach(ref))
        self.update(live, row)
        live.note(f"sandbox started from template {row.template}")
        return live

    # Changes and end

    def update(self, live: LiveSandbox, row: SandboxRow) -> None:
        """Store a changed row and set its expiry."""
        live.row = row
        self.tables.sandboxes.put(row)
        if row.state is State.RUNNING:
            self._clock.set(row.id, row.end_at)
        else:
            self._clock.drop(row.id)

    async def kill(self, live: LiveSandbox) -> None:
        """Kill a sandbox, even if the client disconnects. Raises SandboxError."""
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
        """Remove a dead sandbox."""
        if self._live.pop(live.row.id, None) is None:
            return
        self._clock.drop(live.row.id)
        self.tables.sandboxes.drop(live.row.id)
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
            logger.warning("cannot end sandbox %s after its timeout: %s", live.row.id, error)
            self.forget(live)

    async def pause(self, live: LiveSandbox, *, only_if_due: bool = False) -> None:
        """Stop a sandbox's processes and the clock of its timeout. Raises ApiError 409, SandboxError."""
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
        """Resume a sandbox for `timeout_s` seconds. Returns False if it is running already. Raises SandboxError."""
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
        """Make a sandbox end `timeout_s` seconds from now. Raises SandboxError."""
        async with live.changing:
            end_at = time.time() + timeout_s
            if live.row.state is not State.RUNNING or (only_longer and end_at <= live.row.end_at):
                return
            await live.handle.renew(timeout_s + LEASE_MARGIN_S)
            self.update(live, replace(live.row, timeout_s=timeout_s, end_at=end_at))


@dataclass(slots=True)
class _Boot:
    """A create in progress, with its `result` if other requests can wait for it."""

    row: SandboxRow
    result: asyncio.Future[SandboxRow] | None = None


def _new_row(
    owner: Owner, order: NewSandbox, image: str, timeout_s: int, client_key: str, request_digest: str
) -> SandboxRow:
    sandbox_id = f"i{secrets.token_hex(10)}"
    chosen_s = float(timeout_s if order.timeout is None else order.timeout)
    if order.timeout is None and owner.ceilings.lifetime_s is not None:
        chosen_s = min(chosen_s, float(owner.ceilings.lifetime_s))
    named = hashlib.sha256(f"{owner.name}:{client_key}".encode()).hexdigest()[:40]
    return SandboxRow(
        id=sandbox_id,
        owner=owner.name,
        boot_key=f"e2b-{named}" if client_key else sandbox_id,
        template=order.template_id,
        image=image,
        access_token=secrets.token_hex(32),
        memory_bytes=owner.ceilings.memory_bytes,
        disk_bytes=owner.ceilings.disk_bytes,
        processes=owner.ceilings.processes,
        cpus=owner.ceilings.cpus,
        lifetime_s=owner.ceilings.lifetime_s,
        timeout_s=chosen_s,
        started_at=time.time(),
        end_at=time.time() + chosen_s,
        pause_at_end=order.auto_pause,
        auto_resume=order.auto_resume is not None and order.auto_resume.enabled,
        metadata=dict(order.metadata),
        env=dict(order.env_vars),
        client_key=client_key,
        request_digest=request_digest,
        secure=bool(order.secure) or order.network.allow_public_traffic is False,
    )


def spec_of(row: SandboxRow) -> SandboxSpec:
    """Return the sandbox specification for the provider."""
    files = {f"{_FILES}/.{name}": value for name, value in row.base_env.items()}
    return SandboxSpec(
        image=row.image,
        ttl_s=row.timeout_s + LEASE_MARGIN_S,
        idempotency_key=row.boot_key,
        labels={ID_LABEL: row.id, OWNER_LABEL: row.owner},
        memory_bytes=row.memory_bytes,
        disk_bytes=row.disk_bytes,
        pids=row.processes,
        cpu=row.cpus,
        guest=Guest(user=_USER, sudo=row.sudo, files=files) if row.guest else None,
    )


async def recover(sandboxes: Sandboxes) -> None:
    """Recover all rows. Call this once, before the server accepts requests. Overdue sandboxes end when the expiry clock
    starts. Raises SandboxError if the provider cannot list its sandboxes."""
    rows = sandboxes.tables.sandboxes.all()
    if not rows:
        return
    infos = await sandboxes.backend.list()
    alive = {str(info.id) for info in infos}
    keys = {info.idempotency_key for info in infos}
    for row in rows:
        try:
            if row.state is State.BOOTING and row.boot_key in keys:
                ref = await sandboxes.backend.create(spec_of(row))
                now = time.time()
                done = replace(row, ref=ref, state=State.RUNNING, started_at=now, end_at=now + row.timeout_s)
                live = await sandboxes.adopt(done, ref)
                if not row.client_key:
                    await sandboxes.kill(live)
            elif row.state is not State.BOOTING and row.ref is not None and str(row.ref.id) in alive:
                await sandboxes.adopt(row, row.ref)
            else:
                sandboxes.tables.sandboxes.drop(row.id)
        except SandboxError as error:
            logger.warning("cannot recover sandbox %s: %s", row.id, error)
            sandboxes.tables.sandboxes.drop(row.id)
