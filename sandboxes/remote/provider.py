"""Provider `remote`: sandboxes of other hosts, through the exec server there (`headrace sandbox serve`).

Invariants:
- A ref's endpoint is the server's base URL and its secret opens one sandbox: any process that holds it attaches.
- A create with a key is repeated safely; one that is cancelled leaves nothing.
- `aclose` kills what this object created; `detach` leaves it to its leases. What only attached ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.sandboxes.base import Feature, ImageRef, SandboxId, SandboxInfo, SandboxRef, refuse_folders
from headrace.sandboxes.errors import ProviderUnreachable, SandboxError, SecretRefused, SpecRefused
from headrace.sandboxes.remote.http import RemoteHttp
from headrace.sandboxes.remote.sandbox import RemoteSandbox, sandbox_url
from headrace.sandboxes.retry import RetryConfig

if TYPE_CHECKING:
    import builtins
    from collections.abc import Coroutine
    from types import TracebackType

    from headrace.sandboxes.base import SandboxSpec

PROVIDER: Final = "remote"

logger = logging.getLogger(__name__)


class RemoteConfig(BaseModel):
    """One exec server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(default="", pattern=r"^(https?://[^\s/?#]+(/[^\s?#]*)?)?$")
    """Base URL, as the server announces it; empty for one that only attaches."""
    key_file: Path | None = None
    """Holds the key; none is sent without it, which only a server on loopback takes."""
    connections: int = Field(default=512, ge=1)
    """Requests at once to all hosts together; each command that runs holds one. Teardown has others."""
    silence_s: float = Field(default=20.0, gt=5)
    """A server that says nothing for so long is unreachable; it gives a sign every 5 s."""
    retries: RetryConfig = RetryConfig()
    """Of requests that may be repeated."""


class RemoteProvider:
    """An async context manager. `start` asks the server what it can do."""

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._url = config.url.rstrip("/")
        self._http = RemoteHttp(connections=config.connections, silence_s=config.silence_s, retries=config.retries)
        self._features: frozenset[Feature] = frozenset()
        self._created: dict[SandboxId, SandboxRef] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def features(self) -> frozenset[Feature]:
        """As the server reported them at `start`."""
        return self._features

    @property
    def url(self) -> str:
        return self._url

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Raises SecretRefused, ProviderUnreachable."""
        answer = await self._ask("GET", "/v1/features", teardown=True)
        known = {feature.value for feature in Feature}
        self._features = frozenset(Feature(name) for name in answer["features"] if name in known)

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Raises the server's typed errors, ProviderUnreachable."""
        refuse_folders(spec, PROVIDER)
        key = spec.idempotency_key or f"once-{secrets.token_hex(16)}"
        order = asdict(spec) | {"idempotency_key": key, "labels": dict(spec.labels)}
        del order["folders"]
        try:
            answer = await self._ask("POST", "/v1/sandboxes", body=order)
        except asyncio.CancelledError:
            self.later(self._ask("DELETE", "/v1/sandboxes", query={"key": key}, teardown=True))
            raise
        ref = SandboxRef(
            provider=PROVIDER, id=SandboxId(answer["id"]), endpoint=self._url, secret=str(answer["secret"])
        )
        self._created[ref.id] = ref
        return ref

    async def attach(self, ref: SandboxRef) -> RemoteSandbox:
        """Also of other servers than this one's. No request is made."""
        return RemoteSandbox(ref, self._http, self.later, self._forget)

    def _forget(self, sandbox: SandboxId) -> None:
        self._created.pop(sandbox, None)

    async def list(self) -> builtins.list[SandboxInfo]:
        """Those of this key."""
        rows = (await self._ask("GET", "/v1/sandboxes", teardown=True))["sandboxes"]
        return [SandboxInfo(**{**row, "id": SandboxId(row["id"])}) for row in rows]

    async def images(self) -> tuple[ImageRef, ...]:
        """What this key may boot beside `host`: names of the server's image map, and snapshots."""
        return tuple(ImageRef(name) for name in (await self._ask("GET", "/v1/images"))["images"])

    async def destroy(self, sandbox: SandboxId) -> None:
        await self._ask("DELETE", f"/v1/accounts/self/sandboxes/{checked_name(sandbox)}", teardown=True)
        self._forget(sandbox)

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        key = await asyncio.to_thread(self._key)
        return await self._http.call(method, self._url + path, key, repeatable=True, **options)

    def _key(self) -> str:
        if self._config.key_file is None:
            return ""
        try:
            return self._config.key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SecretRefused(f"key_file {self._config.key_file}: {error}") from error

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """End something for a caller that left; `aclose` waits for it."""
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """Kill what was created here and is not killed yet; what cannot be reached ends with its lease. Idempotent."""
        for ref in list(self._created.values()):
            url = sandbox_url(ref)
            self.later(self._http.call("DELETE", url, ref.secret, repeatable=True, teardown=True))
        self._created.clear()
        await self.detach()

    async def detach(self) -> None:
        """Close, and leave the sandboxes to whoever holds their refs."""
        if self._ending:
            await asyncio.wait(set(self._ending))
        await self._http.close()


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except SandboxError as error:
        if isinstance(error, ProviderUnreachable):
            logger.warning("a sandbox is left to its lease: %s", error)


def checked_name(name: str) -> str:
    """As part of a URL path. Raises SpecRefused."""
    if not name or not all(char.isalnum() or char in "-_." for char in name) or set(name) == {"."}:
        raise SpecRefused(f"{name[:80]!r} is no id of a sandbox")
    return name
