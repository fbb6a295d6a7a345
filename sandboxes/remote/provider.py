"""Provider `remote`: sandboxes on another host, through its exec server (`headrace serve sandbox`).

Invariants:
- A ref's endpoint is the server's base URL and its secret opens one sandbox, so any process with the ref can attach.
- A create with a key can be repeated safely; a cancelled create leaves nothing behind.
- `aclose` kills the sandboxes that this object created; `detach` leaves them running until their leases end. Neither
  ends sandboxes to which this object has only attached.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.base import Feature, ImageRef, SandboxId, SandboxInfo, SandboxRef, SandboxSpec, refuse_extras
from headrace.sandboxes.errors import ProviderUnreachable, SandboxError, SpecRefused
from headrace.sandboxes.host.key_files import read_private
from headrace.sandboxes.remote.http import RemoteHttp
from headrace.sandboxes.remote.sandbox import RemoteSandbox, sandbox_url
from headrace.sandboxes.retry import RetryConfig

PROVIDER: Final = "remote"

logger = logging.getLogger(__name__)


class RemoteConfig(Section):
    """One exec server."""

    url: str = Field(default="", pattern=r"^(https?://[^\s/?#]+(/[^\s?#]*)?)?$")
    """Base URL, as the server prints it; empty for a provider that only attaches."""
    key_file: Path | None = None
    """File with the key. Without it no key is sent, which only a server on loopback accepts."""
    connections: int = Field(default=512, ge=1)
    """Maximum number of concurrent requests to all hosts; each running command takes one. Teardown has its own
    connection pool."""
    silence_s: float = Field(default=20.0, gt=5)
    """A server that is silent for this long is considered unreachable; it sends a heartbeat every 5 s."""
    retries: RetryConfig = RetryConfig()
    """Retries of idempotent requests."""


class RemoteProvider:
    """Client of one exec server; an async context manager. `start` queries the server's features."""

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self.url = config.url.rstrip("/")
        self._http = RemoteHttp(connections=config.connections, silence_s=config.silence_s, retries=config.retries)
        self._features: frozenset[Feature] = frozenset()
        self._created: dict[SandboxId, SandboxRef] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def features(self) -> frozenset[Feature]:
        """Features that the server reported at `start`."""
        return self._features

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Query the server's features. Raises SecretRefused, ProviderUnreachable."""
        answer = await self._request("GET", "/v1/features", teardown=True)
        known = {feature.value for feature in Feature}
        self._features = frozenset(Feature(name) for name in answer["features"] if name in known)

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Create a sandbox. Raises the server's typed errors, ProviderUnreachable."""
        refuse_extras(spec, PROVIDER)
        key = spec.idempotency_key or f"once-{secrets.token_hex(16)}"
        order = asdict(spec) | {"idempotency_key": key, "labels": dict(spec.labels)}
        del order["guest"]
        del order["folders"]
        try:
            answer = await self._request("POST", "/v1/sandboxes", body=order)
        except asyncio.CancelledError:
            self.later(self._request("DELETE", "/v1/sandboxes", query={"key": key}, teardown=True))
            raise
        ref = SandboxRef(provider=PROVIDER, id=SandboxId(answer["id"]), endpoint=self.url, secret=str(answer["secret"]))
        self._created[ref.id] = ref
        return ref

    async def attach(self, ref: SandboxRef) -> RemoteSandbox:
        """Attach to a sandbox, even one on another server, without a request."""
        return RemoteSandbox(ref, self._http, self.later, self._forget)

    def _forget(self, sandbox: SandboxId) -> None:
        self._created.pop(sandbox, None)

    async def list(self) -> builtins.list[SandboxInfo]:
        """Return the sandboxes that were created with this key."""
        rows = (await self._request("GET", "/v1/sandboxes", teardown=True))["sandboxes"]
        return [SandboxInfo(**{**row, "id": SandboxId(row["id"])}) for row in rows]

    async def images(self) -> tuple[ImageRef, ...]:
        """Return the images that this key may boot besides `host`: names of the server's image map, and snapshots."""
        return tuple(ImageRef(name) for name in (await self._request("GET", "/v1/images"))["images"])

    async def destroy(self, sandbox: SandboxId) -> None:
        await self._request("DELETE", f"/v1/accounts/self/sandboxes/{checked_name(sandbox)}", teardown=True)
        self._forget(sandbox)

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        key = await asyncio.to_thread(self._key)
        return await self._http.call(method, self.url + path, key, repeatable=True, **options)

    def _key(self) -> str:
        if self._config.key_file is None:
            return ""
        return read_private(self._config.key_file, "key_file").strip()

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a clean-up for a caller that was cancelled; `aclose` waits for it."""

        async def quietly() -> None:
            try:
                await work
            except SandboxError as error:
                if isinstance(error, ProviderUnreachable):
                    logger.warning("cannot kill a sandbox; it will end with its lease: %s", error)

        task = asyncio.get_running_loop().create_task(quietly())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """Kill the sandboxes that were created here; those that cannot be reached end with their lease. Idempotent."""
        for ref in list(self._created.values()):
            url = sandbox_url(ref)
            self.later(self._http.call("DELETE", url, ref.secret, repeatable=True, teardown=True))
        self._created.clear()
        await self.detach()

    async def detach(self) -> None:
        """Close without killing sandboxes, which belong to the holders of their refs from now on."""
        if self._ending:
            await asyncio.wait(set(self._ending))
        await self._http.close()


def checked_name(name: str) -> str:
    """Check a sandbox id that becomes part of a URL path. Raises SpecRefused."""
    if not name or not all(char.isalnum() or char in "-_." for char in name) or set(name) == {"."}:
        raise SpecRefused(f"{name[:80]!r} is not a sandbox id")
    return name
