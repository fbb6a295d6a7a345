"""The providers of a run, for booting sandboxes or for attaching to booted ones.

Invariants:
- The local launcher of a run survives the pool that started it, and the next pool adopts it. It ends with the driving
  process of the run.
- Attaching providers boot nothing, and closing them ends no sandbox.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from headrace.actors.places.config import SandboxKind
from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.leftovers import run_label
from headrace.sandboxes.local.launcher_process import runtime_folder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.simulated.attached import AttachedProvider, host_names
from headrace.sandboxes.simulated.provider import SimulatedProvider
from headrace.sandboxes.unprotected.provider import SubprocessProvider

if TYPE_CHECKING:
    from headrace.actors.places.config import SandboxSection
    from headrace.actors.record.run_directory import RunDirectory
    from headrace.sandboxes.base import SandboxProvider


async def start_hosts(section: SandboxSection, directory: RunDirectory | None) -> dict[str, SandboxProvider]:
    """Start the hosts of a pool, by name: one provider, or several simulated hosts. Raises the errors of
    `start_provider`."""
    if section.provider is SandboxKind.SIMULATED and section.simulated.hosts > 1:
        return {name: SimulatedProvider(section.simulated, name=name) for name in host_names(section.simulated)}
    return {section.provider.value: await start_provider(section, directory)}


async def start_provider(section: SandboxSection, directory: RunDirectory | None) -> SandboxProvider:
    """Start the provider of a run; only `simulated` works without a directory. Raises NamespacesUnavailable,
    LauncherGone, SpecRefused, ProviderUnreachable, SecretRefused."""
    if section.provider is SandboxKind.SIMULATED:
        return SimulatedProvider(section.simulated)
    if directory is None:
        raise SpecRefused(f"sandbox.provider {section.provider.value} needs a run directory; simulated needs none")
    label = run_label(directory.path)
    match section.provider:
        case SandboxKind.SUBPROCESS:
            return SubprocessProvider(label=label)
        case SandboxKind.OCI:
            from headrace.sandboxes.oci.provider import OciProvider

            containers = OciProvider(section.oci)
            await containers.start()
            return containers
        case SandboxKind.REMOTE:
            from headrace.sandboxes.remote.multi_host import MultiHostProvider, remote_hosts

            hosts = MultiHostProvider(remote_hosts(section.remote.urls, section.remote.key_file))
            await hosts.start()
            return hosts
        case SandboxKind.LOCAL:
            local = LocalProvider(
                await asyncio.to_thread(_local_config, section.local, section.pool.max_live, label, directory)
            )
            await local.start()
            return local


def _local_config(config: LocalSandboxConfig, max_live: int, label: str, directory: RunDirectory) -> LocalSandboxConfig:
    changes = {
        "label": label,
        "max_live": config.max_live or max_live * 5 // 4 + 1,
        "stays_in": config.stays_in or runtime_folder(config.runtime_folder) / label,
        "owner_pid": config.owner_pid or directory.driver_pid() or os.getpid(),
    }
    return config.model_copy(update=changes)


def attaching_providers() -> dict[str, SandboxProvider]:
    """Return the attaching providers, by the provider name of a ref. Outside their own pool, simulated sandboxes can be
    attached to, but their commands do nothing."""
    from headrace.sandboxes.oci.provider import OciProvider
    from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider

    return {
        "local": LocalProvider(),
        "subprocess": SubprocessProvider(),
        "simulated": AttachedProvider(),
        "oci": OciProvider(),
        "remote": RemoteProvider(RemoteConfig()),
    }
