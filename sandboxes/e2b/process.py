"""A command in an E2B sandbox, controlled through the SDK's handle.

Invariants:
- Output is buffered in a queue of a few pieces. When it is full, the SDK's reader stops, and back-pressure stops the
  command too.
- Every command has a mark in its environment, which is used to find and kill its whole process tree.
- The SDK decodes output as UTF-8: invalid bytes arrive as U+FFFD.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from typing import Any, Final

from headrace.sandboxes.base import Output, Stream, TerminalSize
from headrace.sandboxes.e2b.errors import SdkOperation, typed
from headrace.sandboxes.errors import ExecTimeout, SandboxFileError, SandboxGone, SpecRefused, Unsupported

MARK: Final = "HEADRACE_EXEC"
_PIECES: Final = 16
_PIECE_BYTES: Final = 1 << 16
_SWEEP_TIMEOUT_S: Final = 30.0
_SWEEPS: Final = 5
_SWEPT_S: Final = 0.5
"""Time to wait for a command to end after a sweep before the sweep is repeated."""
_SIGKILL: Final = 9
_SIGNALED: Final = {"killed": 137, "terminated": 143, "interrupt": 130, "hangup": 129, "segmentation fault": 139}
_SWEEP: Final = """for _ in 1 2 3 4 5 6 7 8 9; do
  found=
  for place in /proc/[0-9]*; do
    [ "${place#/proc/}" = "$$" ] && continue
    tr '\\0' '\\n' < "$place/environ" 2>/dev/null | grep -qx %s || continue
    kill -9 "${place#/proc/}" 2>/dev/null && found=1
  done
  [ -z "$found" ] && exit 0
done
exit 1"""


def wrap(command: str, folder: str | None, stdin_path: str | None) -> str:
    """Return a command for the SDK, which runs it with `bash -l -c`: it changes to the working folder, redirects
    standard input from a file, and executes a fresh bash."""
    default = "cd /workspace 2>/dev/null || cd /"
    enter = default if folder is None else f"cd -- {shlex.quote(folder)} || exit 126"
    source = "" if stdin_path is None else f"exec < {shlex.quote(stdin_path)} && rm -f {shlex.quote(stdin_path)}\n"
    return f"{enter}\n{source}exec /bin/bash -c {shlex.quote(command)}"


async def sweep(sandbox: Any, mark: str) -> None:
    """Kill every process with the mark. Raises SandboxGone, ProviderUnreachable."""
    script = _SWEEP % shlex.quote(f"{MARK}={mark}")
    with typed(SdkOperation.SANDBOX):
        await sandbox.commands.run(script, user="root", timeout=_SWEEP_TIMEOUT_S)


def exit_code_of(error: Any) -> int:
    """Return the shell's exit code for a CommandExitException: after a signal, envd reports -1 and the signal's
    name."""
    if error.exit_code >= 0:
        return int(error.exit_code)
    return next((code for name, code in _SIGNALED.items() if name in (error.error or "")), 137)


class E2bProcess:
    """A running command. Pass `take_stdout` and `take_stderr` to the SDK, then its handle to `follow`."""

    def __init__(self, sandbox: Any, mark: str, *, stdin: bool) -> None:
        self._sandbox = sandbox
        self._mark = mark
        self._stdin = stdin
        self._room = asyncio.Semaphore(_PIECES)
        self._pieces: asyncio.Queue[Output | None] = asyncio.Queue()
        self._result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Retrieve the error, because no caller may ask for the result.
        self._result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._handle: Any = None
        self._following: asyncio.Task[None] | None = None

    def follow(self, handle: Any) -> None:
        """Start the task that waits for the command to end."""
        self._handle = handle
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        try:
            self._result.set_result(await self._exit_code())
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._result.set_exception(error)
        finally:
            self._pieces.put_nowait(None)

    async def _exit_code(self) -> int:
        import e2b

        try:
            with typed(SdkOperation.SANDBOX):
                try:
                    return int((await self._handle.wait()).exit_code)
                except e2b.CommandExitException as error:
                    return exit_code_of(error)
        except ExecTimeout as error:
            if not await is_running(self._sandbox):
                raise SandboxGone(error.message) from error
            await sweep(self._sandbox, self._mark)
            raise

    @property
    def pid(self) -> int:
        return int(self._handle.pid)

    async def take_stdout(self, text: str) -> None:
        await self._take(Stream.STDOUT, text)

    async def take_stderr(self, text: str) -> None:
        await self._take(Stream.STDERR, text)

    async def _take(self, stream: Stream, text: str) -> None:
        data = text.encode()
        for start in range(0, len(data), _PIECE_BYTES):
            await self._room.acquire()
            self._pieces.put_nowait(Output(stream=stream, data=data[start : start + _PIECE_BYTES]))

    async def output(self) -> AsyncIterator[Output]:
        """See `Process.output`."""
        while (piece := await self._pieces.get()) is not None:
            self._room.release()
            yield piece

    async def write_stdin(self, data: bytes) -> None:
        """See `Process.write_stdin`. The service buffers data that the command has not read yet."""
        if not self._stdin or self._result.done():
            raise SandboxFileError("standard input is closed, or the command has ended")
        try:
            content = data if self._is_recent else data.decode()
        except UnicodeDecodeError as error:
            raise Unsupported("this version of the e2b SDK accepts only text: install a newer one") from error
        with typed(SdkOperation.FILE):
            await self._sandbox.commands.send_stdin(self.pid, content)

    @property
    def _is_recent(self) -> bool:
        return hasattr(self._sandbox.commands, "close_stdin")

    async def close_stdin(self) -> None:
        """See `Process.close_stdin`. Raises Unsupported with an older SDK such as 2.25."""
        if not self._stdin or self._result.done():
            return
        if not self._is_recent:
            raise Unsupported("this version of the e2b SDK cannot close standard input: install a newer one")
        self._stdin = False
        with typed(SdkOperation.SANDBOX):
            await self._sandbox.commands.close_stdin(self.pid)

    async def signal(self, number: int) -> None:
        if self._result.done():
            return
        if number == _SIGKILL:
            for _ in range(_SWEEPS):
                await sweep(self._sandbox, self._mark)
                # A process between fork and execve may have no mark yet, so sweep again.
                if (await asyncio.wait([self._result], timeout=_SWEPT_S))[0]:
                    return
            return
        with typed(SdkOperation.SANDBOX):
            await self._sandbox.commands.run(f"kill -{int(number)} {self.pid} 2>/dev/null || true", user="root")

    async def resize(self, size: TerminalSize) -> None:
        raise SpecRefused("this command has no terminal to resize")

    async def wait(self) -> int:
        return await asyncio.shield(self._result)


async def is_running(sandbox: Any) -> bool:
    """Return whether a sandbox still exists. Raises ProviderUnreachable."""
    with typed(SdkOperation.CREATE):
        return bool(await sandbox.is_running())
