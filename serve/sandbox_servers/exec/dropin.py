"""Drop-in implementation of the exec-server and pool contract of Gen-Verse/OpenClaw-RL (`swe-rl/server`).

Clients only need a new URL: routes, fields and replies are those of swe_exec_server.py and swe_env_pool_server.py.
Invariants that those servers lack:
- A timeout kills the command's process tree; a container that gets no requests ends; a create waits if there is no
  room.
- A request that is repeated while it is running, or after a lost response, runs only once (`idempotency`).
- State is on disk; a key is required where one is configured.

Invariants:
- A request that arrives while an equal request is running shares its result.
- If the client has disconnected, the result is stored for the next equal request, which consumes it.
- A result with a client-chosen name is stored for all equal requests.
- At most `MAX_STORED` results are stored; the oldest are dropped. An unnamed request that arrives after the response
  has been sent may be a repetition or a new request. It is treated as a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import orjson
from aiohttp import web

from headrace.sandboxes.errors import ImageUnknown, SandboxError, SandboxGone, SpecRefused
from headrace.sandboxes.remote.error_documents import status_of
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b_state.keys import ApiKeys, Owner
from headrace.serve.sandbox_servers.exec.bodies import read_body
from headrace.serve.sandbox_servers.exec.containers import MAX_CONTAINERS, Containers, new_container
from headrace.serve.sandbox_servers.exec.dropin_bodies import (
    ContainerTarget,
    CreateContainer,
    Diff,
    Evaluate,
    RunCommand,
)
from headrace.serve.sandbox_servers.exec.evaluations import ApplyPatch, Evaluations
from headrace.serve.sandbox_servers.exec.registry import LeasedSandbox, SandboxRegistry
from headrace.serve.sandbox_servers.exec.responses import ResponseParts, error_response, owner_of, respond, retry_after

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Work = Callable[[web.Request, Owner], Coroutine[Any, Any, Any]]
Find = Callable[[Owner, str], LeasedSandbox]

MAX_STORED: Final = 64


class IdempotentRequests:
    """Running work and stored results, keyed by the digest of the request."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks
        self._works: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()

    async def run(self, digest: str, work: Callable[[], Coroutine[Any, Any, Any]], *, named: bool) -> Any:
        """Return the result of `work`, which is started now or was started by an equal request. The work continues if
        its caller is cancelled."""
        entry = self._works.get(digest)
        if entry is None:
            done = [known for known, stored in self._works.items() if stored.done()]
            for known in done[: max(0, len(done) - MAX_STORED + 1)]:
                del self._works[known]
            entry = self._works[digest] = self._tasks.share(work())
        try:
            result = await asyncio.shield(entry)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._forget(digest, entry)
            raise
        if not named:
            self._forget(digest, entry)
        return result

    def _forget(self, digest: str, entry: asyncio.Future[Any]) -> None:
        if self._works.get(digest) is entry:
            del self._works[digest]


class DropIn:
    """Routes of the contract: those of a node, which take a container id, and those of the pool, which take a lease."""

    def __init__(
        self, registry: SandboxRegistry, keys: ApiKeys, lease_s: float, apply_patch: ApplyPatch | None
    ) -> None:
        self._registry = registry
        self._keys = keys
        self._containers = Containers(registry, lease_s)
        self._evaluations = Evaluations(self._containers, apply_patch)
        self._requests = IdempotentRequests(registry.tasks)

    def routes(self) -> list[web.RouteDef]:
        owned = self._owned
        by_id, by_lease = self._containers.find, self._containers.find_lease
        return [
            web.get("/healthz", self._healthz),
            web.get("/images", owned(self._images)),
            web.get("/status", owned(self._status)),
            web.post("/container/create", owned(self._create)),
            web.post("/container/exec", owned(self._exec(by_id))),
            web.post("/container/diff", owned(self._diff(by_id))),
            web.post("/container/evaluate", owned(self._evaluate(by_id))),
            web.post("/container/destroy", owned(self._destroy(by_id))),
            web.post("/allocate", owned(self._allocate)),
            web.post("/heartbeat", owned(self._heartbeat)),
            web.post("/exec", owned(self._exec(by_lease))),
            web.post("/diff", owned(self._diff(by_lease))),
            web.post("/evaluate", owned(self._evaluate(by_lease))),
            web.post("/close", owned(self._destroy(by_lease))),
        ]

    def _owned(self, work: Work) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                owner = owner_of(request, self._keys)
            except SandboxError as error:
                return error_response(error, _error_parts)
            return await respond(request, work(request, owner), _error_parts)

        return handler

    # Status

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        rows = self._registry.table.rows()
        return web.json_response(
            {"ok": True, "running_containers": str(sum(row.container is not None for row in rows))}
        )

    async def _images(self, request: web.Request, owner: Owner) -> Any:
        names = self._registry.images.names()
        return {"ok": True, "images": names, "count": len(names)}

    async def _status(self, request: web.Request, owner: Owner) -> Any:
        await self._registry.list(owner)
        rows = self._containers.all(owner)
        containers = {
            row.id: {"name": known.name, "image": row.image, "created_at": known.created_at} for row, known in rows
        }
        node = {
            "url": _own_url(request),
            "active_containers": len(rows),
            "max_containers": MAX_CONTAINERS,
            "healthy": True,
        }
        pool = {"total_leases": sum(known.lease_id != "" for _, known in rows), "nodes": [node]}
        return {"ok": True, "active_containers": len(rows), "containers": containers, "pool": pool}

    # Containers and leases

    async def _create(self, request: web.Request, owner: Owner) -> Any:
        body = await read_body(request, CreateContainer)
        row = await self._make(owner, body, lease=False)
        assert row.container is not None
        return {"ok": True, "container_id": row.id, "name": row.container.name}

    async def _allocate(self, request: web.Request, owner: Owner) -> Any:
        body = await read_body(request, CreateContainer)
        row = await self._make(owner, body, lease=True)
        assert row.container is not None
        lease_id = row.container.lease_id
        return {"ok": True, "lease_id": lease_id, "container_id": row.id, "node_url": _own_url(request)}

    async def _make(self, owner: Owner, body: CreateContainer, *, lease: bool) -> LeasedSandbox:
        container = new_container(body.cwd, lease=lease, instance_id=body.instance_id)
        key = f"{lease}:{body.idempotency_key}" if body.idempotency_key else ""
        return await self._containers.create(owner, body.image, container, key=key, wait_s=body.timeout)

    async def _heartbeat(self, request: web.Request, owner: Owner) -> Any:
        body = await read_body(request, ContainerTarget)
        await self._containers.renew(self._containers.find_lease(owner, body.target))
        return {"ok": True}

    def _destroy(self, find: Find) -> Work:
        async def work(request: web.Request, owner: Owner) -> Any:
            body = await read_body(request, ContainerTarget)
            try:
                row = find(owner, body.target)
            except SandboxGone:
                return {"ok": True}
            await self._containers.destroy(row)
            return {"ok": True}

        return work

    # Commands

    def _exec(self, find: Find) -> Work:
        async def work(request: web.Request, owner: Owner) -> Any:
            body = await read_body(request, RunCommand)
            row = find(owner, body.target)
            return await self._once(row, body, lambda: self._evaluations.run(row, body))

        return work

    def _diff(self, find: Find) -> Work:
        async def work(request: web.Request, owner: Owner) -> Any:
            body = await read_body(request, Diff)
            return await self._evaluations.diff(find(owner, body.target), body)

        return work

    def _evaluate(self, find: Find) -> Work:
        async def work(request: web.Request, owner: Owner) -> Any:
            body = await read_body(request, Evaluate)
            row = find(owner, body.target)
            return await self._once(row, body, lambda: self._evaluations.evaluate(owner, row, body))

        return work

    async def _once(
        self, row: LeasedSandbox, body: RunCommand | Evaluate, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        identity = body.exec_id or body.model_dump()
        digest = hashlib.sha256(orjson.dumps([row.id, type(body).__name__, identity])).hexdigest()
        return await self._requests.run(digest, work, named=bool(body.exec_id))


def _own_url(request: web.Request) -> str:
    return f"{request.scheme}://{request.host}"


def _error_parts(error: SandboxError) -> ResponseParts:
    match error:
        case SandboxGone() | ImageUnknown():
            status = 404
        case SpecRefused():
            status = 400
        case _:
            status = status_of(error)
    return status, {"ok": False, "error": str(error)}, retry_after(error)
