"""The exec API and the drop-in contract as parts of `headrace sandbox serve`.

Invariant: both share one table; each sees only its own sandboxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.serve.exec.dropin import DropIn
from headrace.serve.exec.registry import Registry
from headrace.serve.exec.routes import ExecApi
from headrace.serve.exec.store import LeasedSandboxTable

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from aiohttp import web

    from headrace.sandboxes.base import SandboxProvider
    from headrace.sandboxes.remote.tasks import ServerTasks
    from headrace.serve.e2b.server import ServerSettings
    from headrace.serve.exec.evaluations import ApplyPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecPart:
    """One server part with `apis`: `exec`, `dropin` or both. `lease_s` is the lease of a container of the drop-in."""

    provider: SandboxProvider
    settings: ServerSettings
    apis: frozenset[str]
    lease_s: float
    apply_patch: ApplyPatch | None = None

    def open(self, stack: AsyncExitStack, tasks: ServerTasks) -> list[web.RouteDef]:
        """See `ServerPart.open`."""
        table = LeasedSandboxTable(self.settings.state_folder)
        stack.callback(table.close)
        keys, images = self.settings.keys, self.settings.images
        registries = {name: Registry(self.provider, table, images, tasks, api=name) for name in sorted(self.apis)}
        if not self.settings.keep_sandboxes:
            for registry in registries.values():
                stack.push_async_callback(registry.end_all)
        routes: list[web.RouteDef] = []
        if "exec" in registries:
            routes += ExecApi(registries["exec"], keys).routes()
        if "dropin" in registries:
            routes += DropIn(registries["dropin"], keys, self.lease_s, self.apply_patch).routes()
        return routes
