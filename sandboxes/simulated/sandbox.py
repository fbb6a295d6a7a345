"""Sandbox of the simulated provider: its files are a dictionary, and its commands take time but do nothing.

Invariants: every call takes the host's latency and fails while the host is down; when a sandbox dies, its running
commands raise SandboxGone, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.sandboxes.base import (
    ExecCommand,
    ExecResult,
    Feature,
    Sandbox,
    SandboxId,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
)
from headrace.sandboxes.errors import (
    ExecResultLost,
    ExecTimeout,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    Unsupported,
)


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedState:
    """The provider's state of one sandbox."""

    id: SandboxId
    secret: str
    spec: SandboxSpec
    stuck: bool
    born: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    lease: asyncio.TimerHandle | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    results: dict[str, asyncio.Future[ExecResult]] = field(default_factory=dict)

    def info(self, now: float) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            state="frozen" if self.frozen else "running",
            expires_in_s=max(0.0, self.lease.when() - now) if self.lease else 0.0,
            labels=dict(self.spec.labels),
            idempotency_key=self.spec.idempotency_key,
        )


class SimulatedHost(Protocol):
    """Interface that the provider offers its sandboxes; every call may raise ProviderUnreachable."""

    @property
    def features(self) -> frozenset[Feature]: ...

    async def answer(self) -> None:
        """Simulate the latency of a call."""

    async def run(self, state: SimulatedState, command: str) -> ExecResult:
        """Return the result of a command after its duration. Raises SandboxGone."""

    def renew(self, state: SimulatedState, ttl_s: float) -> None:
        """Make the lease end `ttl_s` seconds from now."""

    async def kill(self, state: SimulatedState) -> None: ...


class SimulatedSandbox(Sandbox):
    """A simulated sandbox. Every method raises SandboxGone once it is dead."""

    def __init__(self, provider: SimulatedHost, state: SimulatedState | None, ref: SandboxRef) -> None:
        self._provider = provider
        self._found = state
        self._ref = ref

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    def _state(self) -> SimulatedState:
        if self._found is None or self._found.gone.is_set():
            raise SandboxGone(f"sandbox {self.id} is gone")
        if self._found.secret != self._ref.secret:
            raise SecretRefused(f"wrong secret for sandbox {self.id}")
        return self._found

    async def _running(self) -> SimulatedState:
        await self._provider.answer()
        state = self._state()
        if state.frozen:
            raise SandboxGone(f"sandbox {self.id} can run no more commands: it is frozen")
        return state

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`; the result is that of the provider's `execute`."""
        state = await self._running()
        if command.exec_id is not None and Feature.EXEC_ID not in self._provider.features:
            self._refuse("run a command once for each exec_id")
        try:
            async with asyncio.timeout(command.timeout_s):
                if command.exec_id is None:
                    return await self._provider.run(state, command.command)
                if (known := state.results.get(command.exec_id)) is not None:
                    return await asyncio.shield(known)
                first: asyncio.Future[ExecResult]
                first = state.results[command.exec_id] = asyncio.get_running_loop().create_future()
                try:
                    first.set_result(await self._provider.run(state, command.command))
                except BaseException:
                    first.set_exception(ExecResultLost(f"the first call with exec_id {command.exec_id} was cancelled"))
                    # Retrieve the error, because no other caller may ask for it.
                    first.exception()
                    raise
                return first.result()
        except TimeoutError as error:
            text = f"command ran longer than timeout_s={command.timeout_s}: {command.command[:200]!r}"
            raise ExecTimeout(text) from error

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        data = (await self._running()).files.get(path)
        if data is None or len(data) > max_bytes:
            raise SandboxFileError(f"{path}: missing, or more than {max_bytes} bytes")
        return data

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        await self.write_many({path: data.read_bytes() if isinstance(data, Path) else data}, user=user)  # noqa: ASYNC240

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        (await self._running()).files.update(files)

    async def freeze(self) -> None:
        if Feature.FREEZE not in self._provider.features:
            raise Unsupported("this simulated provider cannot freeze: give it Feature.FREEZE")
        await self._provider.answer()
        self._state().frozen = True

    async def renew(self, ttl_s: float) -> None:
        await self._provider.answer()
        self._provider.renew(self._state(), ttl_s)

    async def kill(self) -> None:
        if self._found is None:
            await self._provider.answer()
        else:
            await self._provider.kill(self._found)
