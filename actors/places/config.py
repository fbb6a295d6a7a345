"""Which provider boots the sandboxes of a run, and the settings of each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.actors.section import Section
from headrace.sandboxes.e2b.provider import E2bConfig
from headrace.sandboxes.local.provider import LocalSandboxConfig
from headrace.sandboxes.oci.provider import OciSandboxConfig
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.sandboxes.simulated.provider import SimulationConfig


class SandboxKind(StrEnum):
    """Which provider boots the sandboxes."""

    LOCAL = "local"
    """Linux namespaces on this host."""
    E2B = "e2b"
    """E2B, or a server with its API."""
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
    provider: SandboxKind | str = Field(default=SandboxKind.LOCAL, union_mode="left_to_right")
    """Provider of the sandboxes: `local`, `oci`, `remote`, `e2b`, `simulated`, `subprocess`, which protects nothing, or
    one of another package (docs/extending.md)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a provider of another package, by name."""
    local: LocalSandboxConfig = LocalSandboxConfig()
    """Settings of the namespaces provider."""
    oci: OciSandboxConfig = OciSandboxConfig()
    """Settings of the containers provider."""
    e2b: E2bConfig = E2bConfig()
    """Settings of the E2B provider (extra `e2b`)."""
    remote: RemoteSection = RemoteSection()
    """Where other hosts are."""
    simulated: SimulationConfig = SimulationConfig()
    """Settings of the simulated provider."""
    pool: PoolConfig = PoolConfig()
    """Admission: how many boot and live at once."""
