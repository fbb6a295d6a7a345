"""The config section `sandbox`: the provider of sandboxes and the settings of each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.e2b.provider import E2bConfig
from headrace.sandboxes.local.provider import LocalSandboxSection
from headrace.sandboxes.pool.config import PoolSection
from headrace.sandboxes.simulated.provider import SimulationSection


class SandboxKind(StrEnum):
    """Provider of sandboxes."""

    LOCAL = "local"
    """Linux namespaces on this host."""
    E2B = "e2b"
    """E2B, or a server with its API."""
    REMOTE = "remote"
    """Sandboxes on other hosts, through exec servers (`headrace serve sandbox`)."""
    SIMULATED = "simulated"
    """No real sandboxes: boots take time and fail as configured."""


class RemoteSection(Section):
    urls: tuple[str, ...] = ()
    """Base URLs of exec servers; boots are distributed among them. `"file:/PATH"` of a file with one on each line, or
    `"env:NAME"` of a variable with them, is read by the command that starts the run."""
    key_file: Path | None = None
    """File with the key shared by all servers, relative to the working directory."""


class SandboxSection(Section):
    provider: SandboxKind | str = Field(default=SandboxKind.LOCAL, union_mode="left_to_right")
    """Provider of the sandboxes: `local`, `remote`, `e2b`, `simulated`, or one from another package
    (guide 'Extending headrace')."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a provider from another package."""
    local: LocalSandboxSection = LocalSandboxSection()
    """Settings of the provider `local`."""
    e2b: E2bConfig = E2bConfig()
    """Settings of the provider `e2b`, which needs the extra `e2b`."""
    remote: RemoteSection = RemoteSection()
    """Settings of the provider `remote`."""
    simulated: SimulationSection = SimulationSection()
    """Settings of the provider `simulated`."""
    pool: PoolSection = PoolSection()
    """Settings of the pool, including its limits on booting and live sandboxes."""
