"""Provider `e2b`: sandboxes at e2b.dev, or at any server with its API, through the public SDK (extra `e2b`).

Invariants:
- A ref contains everything that a process needs to use the sandbox: its id, its addresses, envd's version and the
  access token. It does not contain the API key, which is needed to kill the sandbox or renew its lease.
- A cancelled create leaves nothing behind. Retries are left to the pool.
- Metadata contains our labels and the idempotency key, so that a listing shows which sandboxes are ours.
- The transport of current SDKs (pyqwest) names the current span of each request in a `traceparent` header.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import inspect
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlencode

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.base import Feature, Network, SandboxId, SandboxInfo, SandboxRef, SandboxSpec, refuse_extras
from headrace.sandboxes.e2b.errors import SdkOperation, typed
from headrace.sandboxes.e2b.frozen_data import copy_frozen
from headrace.sandboxes.e2b.sandbox import E2bSandbox
from headrace.sandboxes.errors import PermanentSandboxError, SandboxError, SandboxGone, SecretRefused, SpecRefused

PROVIDER: Final = "e2b"
OURS: Final = "headrace"
KEY: Final = "headrace_key"
"""Metadata keys of every sandbox: a mark that it is ours, and its idempotency key."""
REQUEST_TIMEOUT_S: Final = 60.0
"""Timeout of one request to the service."""
NO_SUDO: Final = {"headrace_sudo": "no"}
"""Metadata for `headrace serve sandbox`: an agent that is not root cannot become root."""
_KEY_FORM: Final = re.compile(r"[a-z0-9-]{1,255}")


class E2bConfig(Section):
    """Address and credentials of the service, and the mapping of images to its templates."""

    api_url: str = ""
    """URL of the control plane; by default `E2B_API_URL`, or e2b.dev."""
    sandbox_url: str = ""
    """URL of envd for all sandboxes, for servers other than e2b.dev; by default `E2B_SANDBOX_URL`, or `api_url`."""
    api_key_file: Path | None = None
    """File with the API key; by default the key is the value of `E2B_API_KEY`."""
    template: str = "base"
    """Template to boot for the image `host`, and for all images when `metadata_image_key` is set."""
    metadata_image_key: str = ""
    """Metadata key that carries the image's name; without it, the image is the name of a template."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Metadata to send with every create."""
    internet: bool = False
    """Give sandboxes internet access even if their spec has network `none`. Agents of a recipe do not need it."""
    max_frozen_bytes: int = Field(default=64 << 20, gt=0)
    """Largest size of one data path that an evaluation copies from an agent's sandbox into a clean one."""


class E2bProvider:
    """Provider for one account; an async context manager. `aclose` waits for running kills, and leaves sandboxes
    running until their leases end."""

    features = frozenset({Feature.FREEZE, Feature.SPAWN, Feature.PAUSE})

    def __init__(self, config: E2bConfig | None = None) -> None:
        """Import the SDK. Raises PermanentSandboxError when it is not installed."""
        self._config = config or E2bConfig()
        self._ending: set[asyncio.Task[None]] = set()
        self._frozen: set[SandboxId] = set()
        try:
            import e2b
        except ImportError as error:
            raise PermanentSandboxError("the e2b SDK is not installed: pip install 'headrace[e2b]'") from error
        # The SDK's signature differs between its versions.
        self._kind: Any = e2b.AsyncSandbox

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox. Raises ImageUnknown, SpecRefused, RateLimited, ProviderUnreachable, SecretRefused."""
        if spec.network is not Network.NONE:
            raise SpecRefused(f"network {spec.network.value!r}: set `internet` of the e2b provider instead")
        for mount in spec.mounts:
            if mount.source not in self._frozen:
                raise SpecRefused(f"mount of {mount.source}: only sandboxes that this provider froze can be mounted")
        refuse_extras(spec, PROVIDER)
        for name in ("cpu", "memory_bytes", "disk_bytes", "pids"):
            if getattr(spec, name) is not None:
                raise SpecRefused(f"{name}: fixed by the template of an E2B sandbox; leave it unset")
        if spec.idempotency_key and not self._takes_keys():
            async for found in self._pages({KEY: spec.idempotency_key}):
                with typed(SdkOperation.CREATE):
                    return self._ref(
                        await self._kind.connect(found.sandbox_id, timeout=math.ceil(spec.ttl_s), **self._options())
                    )
        booting = asyncio.get_running_loop().create_task(self._boot(spec))
        try:
            return self._ref(await asyncio.shield(booting))
        except asyncio.CancelledError:

            async def kill() -> None:
                # A sandbox that cannot be killed now ends with its lease.
                with suppress(SandboxError), typed(SdkOperation.SANDBOX):
                    await (await booting).kill()

            task = asyncio.get_running_loop().create_task(kill())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            raise

    async def _boot(self, spec: SandboxSpec) -> Any:
        image_key, image, key = self._config.metadata_image_key, spec.image, spec.idempotency_key
        template = self._config.template if image_key or image == "host" else image
        metadata = {**NO_SUDO, **self._config.metadata, **spec.labels, OURS: "1"}
        if key:
            metadata[KEY] = key
        if image_key and image != "host":
            metadata[image_key] = image
        extra = {}
        if key and self._takes_keys():
            extra["idempotency_key"] = key if _KEY_FORM.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()
        with typed(SdkOperation.CREATE):
            booted = await self._kind.create(
                template=template,
                timeout=math.ceil(spec.ttl_s),
                metadata=metadata,
                allow_internet_access=self._config.internet,
                **extra,
                **self._options(),
            )
        try:
            for mount in spec.mounts:
                with typed(SdkOperation.SANDBOX):
                    source = await self._kind.connect(mount.source, timeout=math.ceil(spec.ttl_s), **self._options())
                await copy_frozen(
                    E2bSandbox(source), E2bSandbox(booted), mount, max_bytes=self._config.max_frozen_bytes
                )
        except BaseException:
            with suppress(SandboxError), typed(SdkOperation.SANDBOX):
                await asyncio.shield(booted.kill())
            raise
        return booted

    def _takes_keys(self) -> bool:
        return "idempotency_key" in inspect.signature(self._kind.create).parameters

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"request_timeout": REQUEST_TIMEOUT_S}
        key_file, key = self._config.api_key_file, os.environ.get("E2B_API_KEY", "")
        if key_file is not None:
            try:
                key = key_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise SecretRefused(f"api_key_file {key_file}: {error.strerror}") from error
            if not key:
                # The SDK would take the key in the environment, which is another account's.
                raise SecretRefused(f"api_key_file {key_file}: it is empty; write the key to it")
        if key:
            options["api_key"] = key
        api_url = self._config.api_url or os.environ.get("E2B_API_URL", "")
        sandbox_url = self._config.sandbox_url or os.environ.get("E2B_SANDBOX_URL", "") or self._config.api_url
        if api_url:
            options["api_url"] = api_url
        if sandbox_url:
            options["sandbox_url"] = sandbox_url
        if self._takes_keys():
            # This option came with the same version of the SDK; retries are left to the pool.
            options["retries"] = 0
        return options

    def _ref(self, sandbox: Any) -> SandboxRef:
        place = {"envd": str(sandbox._envd_version), "domain": sandbox.sandbox_domain or ""}  # noqa: SLF001
        options = self._options()
        place |= {name: options[name] for name in ("api_url", "sandbox_url") if name in options}
        secret = sandbox._envd_access_token or ""  # noqa: SLF001 - the SDK has no public name for these two
        return SandboxRef(provider=PROVIDER, id=SandboxId(sandbox.sandbox_id), endpoint=urlencode(place), secret=secret)

    async def attach(self, ref: SandboxRef) -> E2bSandbox:
        """Attach to a sandbox without a request."""
        from e2b.connection_config import ConnectionConfig
        from packaging.version import Version

        place = {name: values[0] for name, values in parse_qs(ref.endpoint).items()}
        options = self._options() | {name: place[name] for name in ("api_url", "sandbox_url") if name in place}
        headers = {"E2b-Sandbox-Id": ref.id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if ref.secret:
            headers["X-Access-Token"] = ref.secret
        sandbox = self._kind(
            sandbox_id=ref.id,
            envd_version=Version(place["envd"]),
            envd_access_token=ref.secret or None,
            sandbox_domain=place.get("domain"),
            traffic_access_token=None,
            connection_config=ConnectionConfig(extra_sandbox_headers=headers, **options),
        )
        return E2bSandbox(sandbox, self._frozen)

    async def destroy(self, sandbox: SandboxId) -> None:
        self._frozen.discard(sandbox)
        with suppress(SandboxGone), typed(SdkOperation.SANDBOX):
            await self._kind.kill(sandbox, **self._options())

    async def list(self) -> builtins.list[SandboxInfo]:
        """Return our sandboxes in this account."""
        now = time.time()
        found = []
        async for row in self._pages({OURS: "1", **self._config.metadata}):
            metadata = dict(row.metadata or {})
            key = metadata.pop(KEY, "")
            for name in (OURS, *NO_SUDO, self._config.metadata_image_key, *self._config.metadata):
                metadata.pop(name, None)
            rest_s = max(0.0, row.end_at.timestamp() - now)
            state, labels = str(getattr(row.state, "value", row.state)), metadata
            found.append(
                SandboxInfo(
                    id=SandboxId(row.sandbox_id), state=state, expires_in_s=rest_s, labels=labels, idempotency_key=key
                )
            )
        return found

    async def _pages(self, metadata: Mapping[str, str]) -> Any:
        from e2b import SandboxQuery

        pages = self._kind.list(query=SandboxQuery(metadata=dict(metadata)), **self._options())
        while pages.has_next:
            with typed(SdkOperation.CREATE):
                rows = await pages.next_items()
            for row in rows:
                yield row

    async def aclose(self) -> None:
        if self._ending:
            await asyncio.wait(set(self._ending))
