"""Wrappers for the handlers of the control plane, which authenticate requests and convert errors.

Invariants: the key is checked first; a sandbox of another key gives 404, like one that does not exist; every error is a
JSON object with `code` and `message`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxError, SandboxGone
from headrace.serve.e2b_sandboxes.errors import ApiError, api_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from headrace.serve.e2b_sandboxes.keys import ApiKeys, Owner
    from headrace.serve.e2b_sandboxes.lifecycle import Sandboxes
    from headrace.serve.e2b_sandboxes.live_sandbox import LiveSandbox

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    OwnerHandler = Callable[[web.Request, Owner], Awaitable[web.StreamResponse]]
    SandboxHandler = Callable[[web.Request, LiveSandbox], Awaitable[web.StreamResponse]]


class Access:
    """Converts our handlers to those of aiohttp."""

    def __init__(self, sandboxes: Sandboxes, keys: ApiKeys) -> None:
        self._sandboxes = sandboxes
        self._keys = keys

    def owned(self, handler: OwnerHandler) -> Handler:
        """Wrap the handler of a route that requires any valid key."""

        async def wrapped(request: web.Request) -> web.StreamResponse:
            try:
                owner = self._keys.identify(request.headers.get("X-API-Key", ""))
                if owner is None:
                    raise ApiError(401, "missing or wrong API key: set E2B_API_KEY")
                return await handler(request, owner)
            except ApiError as error:
                return error.response()
            except SandboxError as error:
                return api_error(error, repeatable="Idempotency-Key" in request.headers).response()

        return wrapped

    def on_sandbox(self, handler: SandboxHandler) -> Handler:
        """Wrap the handler of a route of one sandbox, which the key must own."""

        async def wrapped(request: web.Request, owner: Owner) -> web.StreamResponse:
            live = self._sandboxes.get(owner, request.match_info["id"])
            try:
                return await handler(request, live)
            except SandboxGone:
                self._sandboxes.forget(live)
                raise

        return self.owned(wrapped)
