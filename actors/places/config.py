"""Which provider boots the sandboxes of a run, and the settings of each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from headrace.actors.section import Section
from headrace.sandboxes.local.provider import LocalSandboxConfig
from headrace.sandboxes.oci.provider import OciSandboxConfig
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.sandboxes.simulated.provider import SimulationConfig


class SandboxKind(StrEnum):
    """Which provider boots the sandboxes."""

    LOCAL = "local"
    """Linux namespaces on this host."""
    OCI = "oci"
    """Containers of runc or runsc on this host."""
    REMOTE = "remote"
    """Other hosts, through their exec servers (`headrace sandbox serve`)."""
    SIMULATED = "simulated"
    """None: they take time, and fail, as the settings say."""
    SUBPROCESS = "subprocess"
    """Plain processes on this host: protects nothing."""


class RemoteSection(Section):
    urls: tuple[str, ...] = ()
    """Base URLs of exec servers; boots are spread over them."""
    key_file: Path | None = None
    """Holds the key of all of them; relative to the working folder."""


class SandboxSection(Section):
    provider: SandboxKind = SandboxKind.LOCAL
    """Where commands run; `subprocess` must be asked for and says what it does not protect."""
    local: LocalSandboxConfig = LocalSandboxConfig()
    """Settings of the namespaces provider."""
    oci: OciSandboxConfig = OciSandboxConfig()
    """Settings of the containers provider."""
    remote: RemoteSection = RemoteSection()
    """Where other hosts are."""
    simulated: SimulationConfig = SimulationConfig()
    """Settings of the simulated provider."""
    pool: PoolConfig = PoolConfig()
    """Admission: how many boot and live at once."""
