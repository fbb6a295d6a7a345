"""Routes of the exec API, `/v1/...`: a `SandboxProvider` and its sandboxes over HTTP (docs/remote.md lists them).

Invariants:
- Create, list, destroy and discard need a key; all other requests need the secret of the sandbox.
- An exec with an exec_id, a spawn, and a create with a key run only once even if the request is repeated, and they
  continue when the client disconnects. Other work is cancelled when its client disconnects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from aiohttp import web

from headrace.sandboxes.base import Feature, Sandbox, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.serve.sandbox_servers.e2b_state.keys import ApiKeys, Owner
from headrace.serve.sandbox_servers.exec.bodies import Create, Renew, read_body
from headrace.serve.sandbox_servers.exec.command_routes import CommandRoutes, FileRoutes, Tunnels
from headrace.serve.sandbox_servers.exec.processes import SpawnTable
from headrace.serve.sandbox_servers.exec.registry import LeasedSandbox, SandboxRegistry
from headrace.serve.sandbox_servers.exec.responses import check_secret, error_response, owner_of, respond

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OwnerWork = Callable[[web.Request, Owner], Coroutine[Any, Any, Any]]
SandboxWork = Callable[[web.Request, LeasedSandbox, Sandbox], Coroutine[Any, Any, Any]]

ONE = "/v1/sandboxes/{id}"


class ExecApi:
    """All routes below `/v1`."""

    def __init__(self, registry: SandboxRegistry, keys: ApiKeys) -> None:
        self._registry = registry
        self._keys = keys
        self._processes = SpawnTable(registry.tasks)
        self._tunnels = Tunnels()

    def routes(self) -> list[web.RouteDef]:
        owned, on = self.owned, self.on_sandbox
        commands, files = CommandRoutes(self._registry, self._processes), FileRoutes()
        return [
            web.get("/v1/healthz", self._healthz),
            web.get("/v1/features", owned(self._features)),
            web.get("/v1/images", owned(self._images)),
            web.get("/v1/sandboxes", owned(self._list)),
            web.post("/v1/sandboxes", owned(self._create)),
            web.delete("/v1/sandboxes", owned(self._discard)),
            web.delete("/v1/accounts/self/sandboxes/{id}", owned(self._destroy)),
            web.delete(ONE, self._kill),
            web.post(f"{ONE}/freeze", on(self._freeze)),
            web.post(f"{ONE}/pause", on(self._pause)),
            web.post(f"{ONE}/resume", on(self._resume)),
            web.post(f"{ONE}/snapshot", self._snapshot),
            web.post(f"{ONE}/renew", on(self._renew)),
            web.get(f"{ONE}/usage", on(self._usage)),
            web.get(f"{ONE}/expose", self._expose),
            *commands.routes(on),
            *files.routes(on),
        ]

    def owned(self, work: OwnerWork) -> Handler:
        """Return a handler for requests with a key."""

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                owner = owner_of(request, self._keys)
            except SandboxError as error:
                return error_response(error)
            return await respond(request, work(request, owner))

        return handler

    def on_sandbox(self, work: SandboxWork) -> Handler:
        """Return a handler for requests with the sandbox's secret."""

        async def attached(request: web.Request) -> Any:
            row = self._opened(request)
            return await work(request, row, await self._registry.attach(row))

        async def handler(request: web.Request) -> web.StreamResponse:
            return await respond(request, attached(request))

        return handler

    def _opened(self, request: web.Request) -> LeasedSandbox:
        row = self._registry.find(request.match_info["id"])
        check_secret(request, row)
        return row

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"ok": True})

    async def _features(self, request: web.Request, owner: Owner) -> Any:
        # Remote clients must not name folders of this host.
        features = self._registry.provider.features - {Feature.FOLDERS, Feature.GUEST, Feature.PORTS}
        return {"features": sorted(feature.value for feature in features)}

    async def _images(self, request: web.Request, owner: Owner) -> Any:
        snapshots = [one.image for one in self._registry.table.snapshots.all(owner.name)]
        return {"images": [*self._registry.images.names(), *snapshots]}

    async def _list(self, request: web.Request, owner: Owner) -> Any:
        infos = await self._registry.list(owner)
        self._processes.keep_only({str(row.id) for row in self._registry.table.rows()})
        return {"sandboxes": [asdict(info) for info in infos]}

    async def _create(self, request: web.Request, owner: Owner) -> Any:
        body = await read_body(request, Create)
        spec = SandboxSpec(**body.model_dump(exclude={"mounts"}), mounts=body.mounts)
        row = await self._registry.create(owner, spec)
        return {"id": row.id, "secret": row.secret}

    async def _discard(self, request: web.Request, owner: Owner) -> Any:
        await self._registry.discard(owner, request.query.get("key", ""))
        return {}

    async def _destroy(self, request: web.Request, owner: Owner) -> Any:
        await self._registry.destroy(owner, request.match_info["id"])
        self._processes.forget(request.match_info["id"])
        return {}

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        async def kill() -> Any:
            row = self._registry.table.get(request.match_info["id"])
            if row is not None:
                check_secret(request, row)
                await self._registry.kill(row)
                self._processes.forget(row.id)
            return {}

        return await respond(request, kill())

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        async def snapshot() -> Any:
            row = self._opened(request)
            return {"image": await self._registry.tasks.share(self._registry.snapshot(row))}

        return await respond(request, snapshot())

    async def _expose(self, request: web.Request) -> web.StreamResponse:
        async def find() -> Sandbox:
            return await self._registry.attach(self._opened(request))

        return await self._tunnels.serve(request, find)

    async def _freeze(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        await sandbox.freeze()
        self._processes.forget(row.id)
        return {}

    async def _pause(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        await sandbox.pause()
        return {}

    async def _resume(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        await sandbox.resume()
        return {}

    async def _renew(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        ttl_s = (await read_body(request, Renew)).ttl_s
        self._keys.named(row.owner).ceilings.check_lifetime(ttl_s, row.owner)
        await sandbox.renew(ttl_s)
        return {}

    async def _usage(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        return asdict(await sandbox.usage())
