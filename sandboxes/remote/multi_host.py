"""Provider over several exec servers, for `headrace serve sandbox --host-url ...`.

Invariants:
- A key belongs to the first host that received it, as long as that host responds or lists it; a create whose response
  was lost is repeated only there.
- A frozen sandbox can be mounted only on its own host.
- An unreachable host gets no boots until its circuit breaker allows a probe. Otherwise the least loaded host is chosen,
  with a preference for hosts that have the image (`placement`).
- A ref is enough to reach its sandbox, so this provider has no table of sandboxes.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from pydantic import ValidationError

from headrace.buffer.primitives.circuit_breaker import BreakerState, CircuitBreaker
from headrace.sandboxes.base import AVOID_LABEL, Feature, Sandbox, SandboxId, SandboxInfo, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import (
    CapacityExceeded,
    ImageUnknown,
    LauncherGone,
    ProviderUnreachable,
    SandboxError,
    SandboxGone,
    SpecRefused,
)
from headrace.sandboxes.pool.host import HostView, choose
from headrace.sandboxes.remote.http import NotConnected
from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider
from headrace.sandboxes.retry import RetryConfig

_BREAKER_FAILURES: Final = 2
_BREAKER_OPEN_S: Final = 5.0
_PLACES: Final = 512
_DOUBT_S: Final = 3600.0
"""Sandboxes on a silent host count as alive for this long, because their leases may have been renewed."""
_REMEMBERED_KEYS: Final = 16_384

logger = logging.getLogger(__name__)


class _Host:
    """One host: its provider, breaker and sandboxes. `name` is the endpoint of its refs."""

    def __init__(self, name: str, provider: RemoteProvider) -> None:
        self.name = name
        self.provider = provider
        self.breaker = CircuitBreaker(_BREAKER_FAILURES, _BREAKER_OPEN_S)
        self.images: set[str] = set()
        self.infos: dict[SandboxId, SandboxInfo] = {}
        self.seen_s = time.monotonic()
        self.booting = 0
        self.started = False

    def view(self, image: str) -> HostView:
        load = (len(self.infos) + self.booting) / _PLACES
        has_image = image in self.images
        return HostView(name=self.name, is_open=self.breaker.allows(_now()), load=load, has_image=has_image)

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Create a sandbox and report the outcome to the breaker. Raises SandboxError."""
        call = object()
        self.breaker.begin(_now(), call)
        self.booting += 1
        try:
            await self.start()
            ref = await self.provider.create(spec)
        except (ProviderUnreachable, LauncherGone):
            self.breaker.failed(_now(), call)
            raise
        except SandboxError:
            self.breaker.succeeded(call)
            raise
        finally:
            self.booting -= 1
            self.breaker.ended(call)
        self.breaker.succeeded(call)
        self.images.add(spec.image)
        labels, key = dict(spec.labels), spec.idempotency_key
        self.infos[ref.id] = SandboxInfo(
            id=ref.id, state="running", expires_in_s=spec.ttl_s, labels=labels, idempotency_key=key
        )
        return ref

    async def start(self) -> None:
        if not self.started:
            await self.provider.start()
            self.started = True

    async def list(self) -> list[SandboxInfo]:
        """Return the host's sandboxes. If the host is silent, they are assumed to be alive until they must have
        ended."""
        before = set(self.infos)
        try:
            await self.start()
            infos = await self.provider.list()
        except (ProviderUnreachable, LauncherGone) as error:
            logger.warning("host %s is not responding: %s", self.name, error)
            silent_s = _now() - self.seen_s
            return [
                replace(info, expires_in_s=max(0.0, info.expires_in_s - silent_s))
                for info in self.infos.values()
                if silent_s < max(_DOUBT_S, info.expires_in_s)
            ]
        self.seen_s = _now()
        created_meanwhile = {name: info for name, info in self.infos.items() if name not in before}
        self.infos = {info.id: info for info in infos} | created_meanwhile
        return infos


class MultiHostProvider:
    """Provider over at least one host, by URL; an async context manager."""

    def __init__(self, hosts: Sequence[RemoteProvider]) -> None:
        self._hosts = {provider.url: _Host(provider.url, provider) for provider in hosts}
        self._homes: OrderedDict[str, str] = OrderedDict()

    @property
    def features(self) -> frozenset[Feature]:
        """Features that all hosts reached so far have in common."""
        known = [host.provider.features for host in self._hosts.values() if host.started]
        return frozenset.intersection(*known) if known else frozenset()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Query every host. Raises ProviderUnreachable if none responds, and SecretRefused."""
        try:
            for info, host in await self._list():
                self._remember(info.idempotency_key, host)
            if not any(host.started for host in self._hosts.values()):
                raise ProviderUnreachable(f"no host responds: {', '.join(self._hosts)}")
        except BaseException:
            await self.detach()
            raise

    def _remember(self, key: str, host: _Host) -> None:
        if key:
            self._homes[key] = host.name
            self._homes.move_to_end(key)
            while len(self._homes) > _REMEMBERED_KEYS:
                self._homes.popitem(last=False)

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Create a sandbox on one of the hosts. Raises the last host's error."""
        home = None
        if spec.mounts:
            sources = {mount.source for mount in spec.mounts}
            home = next((host for host in self._hosts.values() if sources <= host.infos.keys()), None)
            if home is None:
                raise SpecRefused("mounts: the frozen sandboxes are not all on one host")
        elif (known := self._hosts.get(self._homes.get(spec.idempotency_key, ""))) is not None:
            home = known if known.breaker.state(_now()) is not BreakerState.OPEN else None
        if home is not None:
            return await self._boot(home, spec)
        tried: list[str] = []
        while True:
            views = [host.view(spec.image) for host in self._hosts.values()]
            host = self._hosts[choose(views, tried, spec.labels.get(AVOID_LABEL, "").split())]
            tried.append(host.name)
            try:
                return await self._boot(host, spec)
            except (CapacityExceeded, ImageUnknown, NotConnected):
                # The host made no sandbox, so another one may.
                self._homes.pop(spec.idempotency_key, None)
                if len(tried) >= len(self._hosts):
                    raise

    async def _boot(self, host: _Host, spec: SandboxSpec) -> SandboxRef:
        self._remember(spec.idempotency_key, host)
        try:
            return await host.create(spec)
        except SandboxError as error:
            error.host = host.name
            raise

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Attach to a sandbox. Raises SandboxGone if its host is not one of these."""
        host = self._hosts.get(ref.endpoint)
        if host is None:
            raise SandboxGone(f"the sandbox's host {ref.endpoint} is not a --host-url of this server")
        return await host.provider.attach(ref)

    async def list(self) -> builtins.list[SandboxInfo]:
        """Return the sandboxes of all hosts. Those on a silent host count as alive for an hour, or until their lease
        ends."""
        return [info for info, _ in await self._list()]

    async def _list(self) -> builtins.list[tuple[SandboxInfo, _Host]]:
        hosts = list(self._hosts.values())
        found = await asyncio.gather(*(host.list() for host in hosts))
        return [(info, host) for host, infos in zip(hosts, found, strict=True) for info in infos]

    async def destroy(self, sandbox: SandboxId) -> None:
        """Kill a sandbox on the host that has it, or on all hosts if that is unknown."""
        owners = [host for host in self._hosts.values() if sandbox in host.infos] or list(self._hosts.values())
        for host in owners:
            await host.provider.destroy(sandbox)
            host.infos.pop(sandbox, None)

    async def aclose(self) -> None:
        """Kill the sandboxes that were created here."""
        await asyncio.gather(*(host.provider.aclose() for host in self._hosts.values()))

    async def detach(self) -> None:
        """Close without killing sandboxes."""
        await asyncio.gather(*(host.provider.detach() for host in self._hosts.values()))


def remote_hosts(
    urls: Sequence[str], key_file: Path | None, retries: RetryConfig | None = None
) -> list[RemoteProvider]:
    """Return the providers for `MultiHostProvider`. Raises SpecRefused."""
    try:
        configs = [RemoteConfig(url=url, key_file=key_file, retries=retries or RetryConfig()) for url in urls]
    except ValidationError as error:
        raise SpecRefused(f"host {error.errors()[0]['input']!r}: give a base URL, like http://host:port") from error
    if not all(urls) or len({config.url.rstrip("/") for config in configs}) < len(configs):
        raise SpecRefused("hosts: a URL is empty or given twice; give each host once")
    return [RemoteProvider(config) for config in configs]


def _now() -> float:
    return time.monotonic()
