"""Simulated sandboxes for processes other than the one that booted them.

Invariants:
- Commands do nothing and take no time; on a broken host sandboxes boot, but every command fails.
- A sandbox has used the CPU time that its user says, because nothing runs in it.
"""

from __future__ import annotations

from typing import Final

from headrace.sandboxes.base import ExecCommand, ExecResult, SandboxRef, SandboxUsage
from headrace.sandboxes.errors import SandboxGone
from headrace.sandboxes.simulated.provider import BROKEN, SUCCESS, SimulatedProvider
from headrace.sandboxes.simulated.sandbox import SimulatedHost, SimulatedSandbox, SimulatedState

USED_BYTES: Final = 64 << 20
"""Memory of every simulated sandbox."""


class AttachedProvider(SimulatedProvider):
    """Provider that attaches to the sandboxes of any simulated host."""

    async def attach(self, ref: SandboxRef) -> SimulatedSandbox:
        return AttachedSandbox(self, None, ref)


class AttachedSandbox(SimulatedSandbox):
    """A simulated sandbox that another process booted."""

    def __init__(self, provider: SimulatedHost, state: SimulatedState | None, ref: SandboxRef) -> None:
        super().__init__(provider, state, ref)
        self._cpu_s = self._waited_s = 0.0

    @property
    def host(self) -> str:
        """Name of the sandbox's host."""
        return self._ref.host

    def spend(self, cpu_s: float, waited_s: float) -> None:
        """Count CPU time of a simulated command, and the time for which it waited for a CPU."""
        self._cpu_s += cpu_s
        self._waited_s += waited_s

    async def usage(self) -> SandboxUsage:
        return SandboxUsage(
            cpu_s=self._cpu_s,
            memory_bytes=USED_BYTES,
            memory_limit_bytes=None,
            disk_bytes=0,
            disk_limit_bytes=None,
            processes=1,
            cpus=None,
            oom_kills=0,
            memory_peak_bytes=USED_BYTES,
            cpu_waited_s=self._waited_s,
        )

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """Succeed without doing anything. Raises SandboxGone on a broken host."""
        if self._ref.endpoint.startswith(BROKEN):
            raise SandboxGone(f"host {self._ref.endpoint} breaks every command (sandbox.simulated.broken_hosts)")
        return SUCCESS
