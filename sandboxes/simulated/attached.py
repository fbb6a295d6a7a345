"""Simulated sandboxes for processes other than the one that booted them.

Invariant: commands do nothing and take no time; on a broken host sandboxes boot, but every command fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import SandboxGone
from headrace.sandboxes.simulated.provider import SUCCESS, SimulatedProvider, SimulationConfig
from headrace.sandboxes.simulated.sandbox import SimulatedSandbox

if TYPE_CHECKING:
    from headrace.sandboxes.base import ExecCommand, ExecResult, SandboxRef

BROKEN: Final = "broken"
"""Prefix of the names of broken hosts."""


def host_names(config: SimulationConfig) -> tuple[str, ...]:
    """Return a name for each host, the broken ones last."""
    whole = config.hosts - config.broken_hosts
    return tuple(f"host-{n}" if n < whole else f"{BROKEN}-{n - whole}" for n in range(config.hosts))


class AttachedProvider(SimulatedProvider):
    """Provider that attaches to the sandboxes of any simulated host."""

    async def attach(self, ref: SandboxRef) -> SimulatedSandbox:
        return AttachedSandbox(self, None, ref)


class AttachedSandbox(SimulatedSandbox):
    """A simulated sandbox that another process booted."""

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """Succeed without doing anything. Raises SandboxGone on a broken host."""
        if self._ref.endpoint.startswith(BROKEN):
            raise SandboxGone(f"host {self._ref.endpoint} breaks every command (sandbox.simulated.broken_hosts)")
        return SUCCESS
