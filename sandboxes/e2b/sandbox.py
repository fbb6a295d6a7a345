"""Sandbox of an E2B service, accessed through the SDK's sandbox object.

Invariants:
- When ExecTimeout is raised, the command and its whole process tree are dead.
- A failed read is an error, never empty content.
- Output is truncated at `max_output_bytes`; the SDK decodes it as UTF-8, with U+FFFD for invalid bytes.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from headrace.sandboxes.base import ExecCommand, ExecResult, Process, Sandbox, SandboxId, SpawnCommand, Stream
from headrace.sandboxes.e2b.errors import SdkOperation, typed
from headrace.sandboxes.e2b.frozen_data import kill_all
from headrace.sandboxes.e2b.process import MARK, E2bProcess, sweep, wrap
from headrace.sandboxes.errors import ExecTimeout, SandboxError, SandboxFileError, SandboxGone, SpecRefused, Unsupported

_CONNECT_TIMEOUT_S: Final = 300
_ANSWER_GRACE_S: Final = 30.0
_SIGKILL: Final = 9
_EXIT_CANNOT_RUN: Final = 126


class _CannotRunError(SandboxError):
    """The user does not exist in the sandbox."""


@contextmanager
def _cannot_run() -> Iterator[None]:
    """Convert envd's error for an unknown user, which differs from the error for a wrong token only in its message."""
    import e2b

    try:
        yield
    except e2b.AuthenticationException as error:
        if "username" not in str(error):
            raise
        raise _CannotRunError(f"cannot run the command: {error}") from error


class E2bSandbox(Sandbox):
    """A sandbox of the service, identified by its ref. Every method raises SandboxGone once it is dead."""

    def __init__(self, sandbox: Any, frozen: set[SandboxId] | None = None) -> None:
        self._sandbox = sandbox
        self._frozen = set() if frozen is None else frozen

    @property
    def id(self) -> SandboxId:
        return SandboxId(self._sandbox.sandbox_id)

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`; the command runs under a login shell."""
        if command.exec_id is not None:
            raise Unsupported("exec_id is not supported: an E2B sandbox does not store results")
        started = time.monotonic()
        kept = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
        truncated = False
        try:
            process = await self._start(command)
        except _CannotRunError as error:
            return ExecResult(
                exit_code=_EXIT_CANNOT_RUN, stdout=b"", stderr=str(error).encode(), truncated=False, duration_s=0.0
            )
        try:
            async with asyncio.timeout(command.timeout_s + _ANSWER_GRACE_S):
                async for piece in process.output():
                    room = command.max_output_bytes - len(kept[piece.stream])
                    kept[piece.stream] += piece.data[:room]
                    truncated = truncated or len(piece.data) > room
                code = await process.wait()
        except TimeoutError as error:
            await asyncio.shield(process.signal(_SIGKILL))
            text = f"command did not end within timeout_s={command.timeout_s}: {command.command[:200]!r}"
            raise ExecTimeout(text) from error
        except asyncio.CancelledError:
            await asyncio.shield(process.signal(_SIGKILL))
            raise
        return ExecResult(
            exit_code=code,
            stdout=bytes(kept[Stream.STDOUT]),
            stderr=bytes(kept[Stream.STDERR]),
            truncated=truncated,
            duration_s=time.monotonic() - started,
        )

    async def start_process(self, command: SpawnCommand) -> Process:
        """See `Sandbox.spawn`. Raises SpecRefused for an unknown user."""
        if command.terminal is not None:
            raise Unsupported("E2B's terminals run a login shell only, not a command")
        try:
            return await self._start(command)
        except _CannotRunError as error:
            raise SpecRefused(str(error)) from error

    async def _start(self, command: ExecCommand | SpawnCommand) -> E2bProcess:
        text = command.command if isinstance(command.command, str) else f"exec {shlex.join(command.command)}"
        mark = secrets.token_hex(16)
        path = None
        if isinstance(command.stdin, bytes):
            path = f"/tmp/.headrace-{mark}"
            await self.write(path, command.stdin, user=command.user)
        process = E2bProcess(self._sandbox, mark, stdin=command.stdin is True)
        # Newer SDKs would retain all output in memory.
        parameters = inspect.signature(self._sandbox.commands.run).parameters
        options = {"retain_output": False} if "retain_output" in parameters else {}
        try:
            with typed(SdkOperation.SANDBOX), _cannot_run():
                handle = await self._sandbox.commands.run(
                    wrap(text, command.cwd, path),
                    background=True,
                    envs={**command.env, MARK: mark},
                    user=command.user,
                    stdin=command.stdin is True,
                    timeout=command.timeout_s or 0,
                    on_stdout=process.take_stdout,
                    on_stderr=process.take_stderr,
                    **options,
                )
        except (ExecTimeout, asyncio.CancelledError):
            # The command may have started without a response.
            await asyncio.shield(sweep(self._sandbox, mark))
            raise
        process.follow(handle)
        return process

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        content = bytearray()
        with typed(SdkOperation.FILE):
            stream = await self._sandbox.files.read(path, format="stream", user=user)
            async for part in stream:
                content += part
                if len(content) > max_bytes:
                    await stream.aclose()
                    raise SandboxFileError(f"{path}: more than {max_bytes} bytes")
        return bytes(content)

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        with typed(SdkOperation.FILE):
            if isinstance(data, bytes):
                await self._sandbox.files.write(path, data, user=user)
                return
            with await asyncio.to_thread(data.open, "rb") as file:
                await self._sandbox.files.write(path, file, user=user, use_octet_stream=True)

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        with typed(SdkOperation.FILE):
            await self._sandbox.files.write_files(
                [{"path": path, "data": data} for path, data in files.items()], user=user
            )

    async def freeze(self) -> None:
        """See `Sandbox.freeze`. The sandbox keeps running until its lease ends, with none of the agent's processes."""
        await kill_all(self)
        self._frozen.add(self.id)

    async def pause(self) -> None:
        with typed(SdkOperation.SANDBOX):
            await self._sandbox.pause()

    async def resume(self) -> None:
        """See `Sandbox.resume`. Extends the lease to at least five minutes."""
        with typed(SdkOperation.SANDBOX):
            await self._sandbox.connect(timeout=_CONNECT_TIMEOUT_S)

    async def renew(self, ttl_s: float) -> None:
        with typed(SdkOperation.SANDBOX):
            await self._sandbox.set_timeout(math.ceil(ttl_s))

    async def kill(self) -> None:
        with suppress(SandboxGone), typed(SdkOperation.SANDBOX):
            await self._sandbox.kill()
