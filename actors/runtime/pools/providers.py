"""The providers of a run, which boot sandboxes or attach to ones that are already running.

Invariants:
- A run's local launcher survives the pool that started it, and the next pool adopts it. The launcher exits together
  with the run's driver process.
- Attaching providers do not boot anything, and closing them does not end any sandbox.
- Only images that can never boot are refused. A host that is not answering now may have the image, and a debootstrap
  suite is checked only when it is built.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeAlias

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory, sandbox_owner
from headrace.actors.runtime.pools.config import SandboxKind, SandboxSection
from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.buffer.tasks.task import TaskId
from headrace.sandboxes.base import Feature, Sandbox, SandboxId, SandboxInfo, SandboxProvider, SandboxRef, SandboxSpec
from headrace.sandboxes.e2b.provider import E2bProvider
from headrace.sandboxes.errors import ImageUnknown, PermanentSandboxError, ProviderUnreachable, SpecRefused
from headrace.sandboxes.host.leftovers import run_label
from headrace.sandboxes.images.store import check_reference
from headrace.sandboxes.local.images import HOST
from headrace.sandboxes.local.launcher_process import runtime_folder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.remote.provider import RemoteProvider
from headrace.sandboxes.simulated.attached import AttachedProvider
from headrace.sandboxes.simulated.provider import SimulatedProvider

StartProvider: TypeAlias = Callable[[SandboxSection, RunDirectory], Awaitable[SandboxProvider]]

_MEMBERS: Final = ("features", "create", "attach", "list", "destroy", "aclose")


async def start_hosts(section: SandboxSection, directory: RunDirectory | None) -> dict[str, SandboxProvider]:
    """Start the hosts of a pool, by name: one provider, or as many simulated hosts as the section says. Raises the same
    errors as `start_provider`."""
    if section.provider is SandboxKind.SIMULATED and section.simulated.hosts > 1:
        return {name: SimulatedProvider(section.simulated, name=name) for name in section.simulated.host_names}
    return {str(section.provider): await start_provider(section, directory)}


async def start_provider(section: SandboxSection, directory: RunDirectory | None) -> SandboxProvider:
    """Start the provider of a section. Every provider except `simulated` needs a directory. Raises
    NamespacesUnavailable, LauncherGone, SpecRefused, ProviderUnreachable, SecretRefused, PermanentSandboxError,
    ConfigError."""
    if section.provider is SandboxKind.SIMULATED:
        return SimulatedProvider(section.simulated)
    if directory is None:
        raise SpecRefused(f"sandbox.provider {section.provider} needs a run directory; simulated needs none")
    try:
        return await PROVIDERS.find(section.provider)(section, directory)
    except PartRefused as error:
        raise ConfigError(f"sandbox.provider: {error}") from error


def check_provider(section: SandboxSection) -> None:
    """Raise ConfigError if a section's provider does not exist or lacks something that it needs."""
    try:
        PROVIDERS.find(section.provider)
        if section.provider is SandboxKind.E2B:
            E2bProvider(section.e2b)
        if not isinstance(section.provider, SandboxKind):
            _outside(section.provider, section.settings)
        elif section.settings:
            raise ConfigError(
                f"sandbox.settings is for providers of other packages only; use sandbox.{section.provider}"
            )
    except (PartRefused, PermanentSandboxError) as error:
        raise ConfigError(f"sandbox.provider: {error}") from error


def attaching_provider(name: str) -> SandboxProvider:
    """Return a provider that attaches to sandboxes whose refs carry this name. Raises SpecRefused, and
    PermanentSandboxError if something that it needs is missing."""
    if name in _ATTACHING:
        return _ATTACHING[name]()
    try:
        return _outside(name, {})
    except (PartRefused, ConfigError) as error:
        raise SpecRefused(f"sandboxes of provider {name!r} cannot be attached to: {error}") from error


class NamedProvider:
    """A provider from another package. Its refs carry the name by which workers find it again."""

    def __init__(self, name: str, provider: SandboxProvider) -> None:
        self._name, self._provider = name, provider

    @property
    def features(self) -> frozenset[Feature]:
        return self._provider.features

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        return replace(await self._provider.create(spec), provider=self._name)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._provider.attach(ref)

    async def list(self) -> builtins.list[SandboxInfo]:
        return await self._provider.list()

    async def destroy(self, sandbox: SandboxId) -> None:
        await self._provider.destroy(sandbox)

    async def aclose(self) -> None:
        await self._provider.aclose()


def _outside(name: str, settings: Mapping[str, Any]) -> NamedProvider:
    """Return the provider from another package with this name, created with these settings. Raises PartRefused,
    ConfigError."""
    make = PROVIDERS.find(name)
    assert isinstance(make, _OfAnotherPackage), "headrace's own providers have kinds"
    return NamedProvider(name, make.made(name, settings))


class _OfAnotherPackage:
    """Starter of a provider from another package: calls `make` with `sandbox.settings`, then the provider's `start` if
    it has one."""

    def __init__(self, make: object) -> None:
        if not callable(make):
            raise TypeError("it cannot be called with the settings")
        self._make: Callable[..., Any] = make

    async def __call__(self, section: SandboxSection, directory: RunDirectory) -> SandboxProvider:
        provider: Any = self.made(section.provider, section.settings)
        if hasattr(provider, "start"):
            await provider.start()
        return NamedProvider(section.provider, provider)

    def made(self, name: str, settings: Mapping[str, Any]) -> SandboxProvider:
        try:
            provider: SandboxProvider = self._make(**settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"sandbox.settings: {name} does not accept them: {error}") from error
        for member in _MEMBERS:
            if not hasattr(provider, member):
                raise ConfigError(
                    f"sandbox.provider: {name!r} did not return a provider: {member!r} is missing "
                    "(guide 'Extending headrace')"
                )
        return provider


async def _local(section: SandboxSection, directory: RunDirectory) -> SandboxProvider:
    label = run_label(directory.path)

    def complete() -> LocalProvider:
        given = section.local.model_dump()
        given["max_live"] = section.local.max_live or section.pool.max_live * 5 // 4 + 1
        owner, folder = directory.driver_pid() or os.getpid(), runtime_folder(None) / label
        return LocalProvider(LocalSandboxConfig(**given, label=label, stays_in=folder, owner_pid=owner))

    provider = await asyncio.to_thread(complete)
    await provider.start()
    return provider


async def _remote(section: SandboxSection, _: RunDirectory) -> SandboxProvider:
    from headrace.sandboxes.remote.multi_host import MultiHostProvider, remote_hosts

    provider = MultiHostProvider(remote_hosts(section.remote.urls, section.remote.key_file))
    await provider.start()
    return provider


async def _e2b(section: SandboxSection, directory: RunDirectory) -> SandboxProvider:
    # Sandboxes of other runs of the same account are not this pool's.
    run = {"headrace_run": sandbox_owner(directory)}
    return E2bProvider(section.e2b.model_copy(update={"metadata": {**section.e2b.metadata, **run}}))


async def _simulated(section: SandboxSection, _: RunDirectory) -> SandboxProvider:
    return SimulatedProvider(section.simulated)


def _attaching_remote() -> SandboxProvider:
    from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider

    return RemoteProvider(RemoteConfig())


PROVIDERS: Final[Registry[StartProvider]] = Registry(
    kind="sandbox provider",
    group="headrace.sandbox_providers",
    own={
        SandboxKind.LOCAL: _local,
        SandboxKind.REMOTE: _remote,
        SandboxKind.E2B: _e2b,
        SandboxKind.SIMULATED: _simulated,
    },
    accept=_OfAnotherPackage,
)
# A simulated sandbox is known to its own pool only: from elsewhere it can be attached to, and its commands do nothing.
_ATTACHING: Final[Mapping[str, Callable[[], SandboxProvider]]] = {
    SandboxKind.LOCAL: LocalProvider,
    SandboxKind.REMOTE: _attaching_remote,
    SandboxKind.E2B: E2bProvider,
    SandboxKind.SIMULATED: AttachedProvider,
}


ANSWER_S: Final = 15.0
"""Timeout for fetching a host's image list; without an answer, images are checked when they boot."""

logger = logging.getLogger(__name__)


def refuse_absent_images(section: SandboxSection, images: Mapping[str, TaskId]) -> None:
    """Check the images, each with a task that names it, which calls the hosts if the provider is `remote`. Raises
    ConfigError, SecretRefused, SpecRefused."""
    named = {image: task_id for image, task_id in images.items() if image != HOST}
    if not named or section.provider is SandboxKind.SIMULATED:
        return
    available: frozenset[str] | None = None
    if section.provider is SandboxKind.REMOTE:
        # In a thread, since the caller may run in an event loop.
        with ThreadPoolExecutor(1) as thread:
            available = thread.submit(lambda: asyncio.run(_available(section))).result()
        if available is None:
            return
    for image, task_id in named.items():
        try:
            if available is None:
                check_reference(image)
            elif image not in available:
                names = ", ".join(sorted(available)[:20]) or "none"
                raise ImageUnknown(f"image {image!r}: no host in sandbox.remote.urls has it; they have {names}")
        except PermanentSandboxError as error:
            raise ConfigError(f"task {task_id}: {error}; correct its image in the task file") from error


async def _available(section: SandboxSection) -> frozenset[str] | None:
    """Return the images of all hosts; None if a host did not answer."""
    from headrace.sandboxes.remote.multi_host import remote_hosts

    hosts = remote_hosts(section.remote.urls, section.remote.key_file)
    answers = await asyncio.gather(*map(_images_of, hosts))
    if None in answers:
        return None
    return frozenset(image for images in answers for image in images or ())


async def _images_of(host: RemoteProvider) -> frozenset[str] | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return frozenset(await host.images())
    except (ProviderUnreachable, TimeoutError) as error:
        logger.warning("host %s did not return its image list: %s", host.url, error or "no answer")
        return None
    finally:
        await host.detach()
