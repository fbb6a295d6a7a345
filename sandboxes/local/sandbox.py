"""Client of one sandbox in a launcher on this host, usable from any process that has its ref.

Invariants:
- Output is captured here, through pipes that lead directly from the command to this process.
- The deadline of a command is enforced inside the sandbox. A sandbox that still does not answer is killed as a whole,
  unless it was paused.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from headrace.sandboxes.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    Command,
    ExecCommand,
    ExecResult,
    HostPort,
    ImageRef,
    Sandbox,
    SandboxId,
    SandboxRef,
    SandboxUsage,
    SpawnCommand,
)
from headrace.sandboxes.errors import ExecTimeout, LauncherGone, SandboxFileError, SandboxGone, SpecRefused, Unsupported
from headrace.sandboxes.launcher.commands import EXIT_FILE_ERROR
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.local.capture import OUTPUT_GRACE_S, OutputCapture, memory_file
from headrace.sandboxes.local.client import LauncherClient, LauncherConnections, open_null
from headrace.sandboxes.local.exposed import is_below, relay
from headrace.sandboxes.local.process import LocalProcess

_FILE_TIMEOUT_S: Final = 60.0
_ANSWER_GRACE_S: Final = 20.0


class _Done(NamedTuple):
    answer: Message
    stdout: bytes
    stderr: bytes
    truncated: bool


def _result(done: _Done) -> ExecResult:
    return ExecResult(
        exit_code=done.answer["exit_code"],
        stdout=done.stdout,
        stderr=done.stderr,
        truncated=done.truncated,
        duration_s=done.answer["duration_s"],
    )


def _message(operation: str, command: Command) -> Message:
    return {"op": operation, "command": command.command, "user": command.user, "env": command.env, "cwd": command.cwd}


class LocalSandbox(Sandbox):
    """Sandbox in a launcher on this host, identified by its ref. Every method raises SandboxGone once it is dead."""

    def __init__(self, ref: SandboxRef, connections: LauncherConnections) -> None:
        self._ref = ref
        self._connections = connections

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`. If a daemon keeps the output open, the call returns 0.2 s after the command itself has
        ended."""
        timeout_s = command.timeout_s
        if math.isnan(timeout_s):
            raise SpecRefused("timeout_s is not a number")
        message = _message("exec", command)
        if command.exec_id is None:
            done = await self._run(message, command.stdin, timeout_s, command.max_output_bytes)
        else:
            done = await self._run_once(message, command.exec_id, command.stdin, timeout_s, command.max_output_bytes)
        if done.answer["timed_out"]:
            text = f"command ran longer than timeout_s={timeout_s} and was killed: {command.command[:200]!r}"
            raise ExecTimeout(text)
        return _result(done)

    async def run_program(
        self,
        program: str,
        arguments: Sequence[str] = (),
        *,
        user: str = "root",
        stdin: bytes = b"",
        timeout_s: float,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """See `ProgramRunner.run_program`."""
        message = {"op": "run", "program": program, "arguments": list(arguments), "user": user}
        done = await self._run(message, stdin, timeout_s, max_output_bytes)
        if done.answer["timed_out"]:
            raise ExecTimeout(f"the program ran longer than timeout_s={timeout_s} and was killed")
        return _result(done)

    async def _run_once(
        self, message: Message, exec_id: str, stdin: bytes | None, timeout_s: float, max_output_bytes: int
    ) -> _Done:
        """Run a command and store its result in the launcher under its `exec_id`, or return the stored result."""
        keep = {"op": "keep", "exec_id": exec_id, "run": secrets.token_hex(8)}
        once = {**message, "exec_id": exec_id, "run": keep["run"]}
        try:
            done = await self._run(once, stdin, timeout_s, max_output_bytes)
            if "stdout_bytes" in (answer := done.answer):
                # The first caller stored standard output and error in one file.
                [descriptor] = answer["descriptors"]
                with os.fdopen(descriptor, "rb") as file:
                    file.seek(0)
                    stdout = file.read(answer["stdout_bytes"])
                    return _Done(answer, stdout, file.read(), truncated=answer["truncated"])
            result = {**done.answer, "stdout_bytes": len(done.stdout), "truncated": done.truncated}
            with suppress(SandboxGone):
                await self._request({**keep, "result": result}, (memory_file(done.stdout + done.stderr),))
        except BaseException:
            # Otherwise other callers would wait for the result as long as this process lives.
            with suppress(SandboxGone):
                (await self._client()).post(self._named({**keep, "result": None}))
            raise
        return done

    async def start_process(self, command: SpawnCommand) -> LocalProcess:
        """See `Sandbox.spawn`."""
        client = await self._client()
        named = self._named({**_message("spawn", command), "timeout_s": command.timeout_s})
        return await LocalProcess.start(client, named, stdin=command.stdin, terminal=command.terminal)

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        message = {"op": "read", "path": path, "user": user, "max_bytes": max_bytes}
        return await self._file_operation(message, None, max_bytes)

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        if isinstance(data, bytes):
            await self.write_many({path: data}, user=user)
            return
        with await asyncio.to_thread(data.open, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            await self._file_operation({"op": "write", "files": [(path, size)], "user": user}, file.fileno(), 4096)

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        sizes = [(path, len(data)) for path, data in files.items()]
        await self._file_operation({"op": "write", "files": sizes, "user": user}, b"".join(files.values()), 4096)

    async def _file_operation(self, message: Message, stdin: bytes | int | None, max_bytes: int) -> bytes:
        done = await self._run(message, stdin, _FILE_TIMEOUT_S, max(max_bytes, 4096))
        exit_code = done.answer["exit_code"]
        if done.answer["timed_out"]:
            raise SandboxFileError(f"the file operation took longer than {_FILE_TIMEOUT_S} s")
        if exit_code == EXIT_FILE_ERROR:
            raise SandboxFileError(done.stderr.decode(errors="replace").strip())
        if exit_code != 0:
            raise SandboxFileError(f"the file operation ended with exit code {exit_code}")
        return done.stdout

    async def _run(self, message: Message, stdin: bytes | int | None, timeout_s: float, max_output_bytes: int) -> _Done:
        """Run a command with captured output. `stdin` may be an open file, which the caller still owns."""
        async with OutputCapture(max_output_bytes) as out, OutputCapture(max_output_bytes) as err:
            match stdin:
                case None:
                    source = open_null()
                case bytes():
                    source = memory_file(stdin)
                case descriptor:
                    source = os.dup(descriptor)
            descriptors = (source, out.write_end, err.write_end)
            answering = asyncio.ensure_future(self._request({**message, "timeout_s": timeout_s}, descriptors))
            try:
                seen_s = 0.0
                while not (await asyncio.wait((answering,), timeout=timeout_s + _ANSWER_GRACE_S))[0]:
                    state = await self._request({"op": "state"})
                    # A pause extends the deadline inside, so that a sandbox which was paused gets another wait.
                    if state["state"] != "paused" and state["paused_s"] == seen_s:
                        await self.kill()
                        text = f"sandbox {self.id} did not answer after timeout_s={timeout_s} and was killed"
                        raise ExecTimeout(text)
                    seen_s = state["paused_s"]
                answer = await answering
            finally:
                if not answering.done():
                    answering.cancel()
                    await asyncio.wait((answering,))
                elif not answering.cancelled():
                    # Mark the error as retrieved, in case another error is raised instead.
                    answering.exception()
            stdout = await out.finish(OUTPUT_GRACE_S)
            stderr = await err.finish(OUTPUT_GRACE_S if not out.held else 0)
        return _Done(answer, stdout, stderr, truncated=out.truncated or err.truncated)

    async def freeze(self) -> None:
        await self._request({"op": "freeze"})

    @asynccontextmanager
    async def expose(self, port: int, target: HostPort, prefix: str) -> AsyncIterator[None]:
        """See `Sandbox.expose`."""
        if not prefix.startswith("/") or not is_below(prefix, prefix):
            raise SpecRefused(f"prefix {prefix!r}: must be a plain URL path that begins with /")
        answer = await self._request({"op": "listen", "port": port})
        with socket.socket(fileno=answer["descriptors"][0]) as listener:
            async with relay(listener, target, prefix):
                yield

    async def tcp_socket(self, *, ipv6: bool = False) -> socket.socket:
        """See `Sandbox.tcp_socket`."""
        answer = await self._request({"op": "socket", "ipv6": ipv6})
        return socket.socket(fileno=answer["descriptors"][0])

    async def snapshot(self) -> ImageRef:
        """See `Sandbox.snapshot`. The image is kept in memory until `drop_image`, or until its launcher dies."""
        return ImageRef((await self._request({"op": "snapshot"}))["image"])

    async def pause(self) -> None:
        await self._request({"op": "pause"})

    async def resume(self) -> None:
        await self._request({"op": "resume"})

    async def usage(self) -> SandboxUsage:
        """Return the current usage. Raises Unsupported if the control groups for memory, cpu or processes are
        missing."""
        state = await self._request({"op": "state"})
        if state["state"] not in ("running", "paused"):
            raise SandboxGone(f"sandbox {self.id} is {state['state']}")
        try:
            return SandboxUsage(
                cpu_s=state["cpu_s"],
                memory_bytes=state["memory_bytes"],
                memory_limit_bytes=state["limits"]["memory_bytes"],
                disk_bytes=state["disk_bytes"],
                disk_limit_bytes=state["disk_limit_bytes"],
                processes=state["processes"],
                cpus=state["limits"]["cpus"],
                oom_kills=state["oom_kills"],
                limit_kills=state["limit_kills"],
                memory_peak_bytes=state.get("memory_peak_bytes"),
                cpu_waited_s=state.get("cpu_waited_s"),
            )
        except KeyError as error:
            raise Unsupported(
                f"usage: this machine has no control group that counts {error}; see headrace doctor"
            ) from error

    async def renew(self, ttl_s: float) -> None:
        await self._request({"op": "renew", "ttl_s": ttl_s})

    async def kill(self) -> None:
        with suppress(SandboxGone):
            await self._request({"op": "kill"})

    async def _request(self, message: Message, descriptors: tuple[int, ...] = ()) -> Message:
        try:
            client = await self._client()
        except SandboxGone:
            close_all(descriptors)
            raise
        try:
            return await client.request(self._named(message), descriptors)
        except LauncherGone as error:
            raise SandboxGone(str(error)) from error

    def _named(self, message: Message) -> Message:
        return {**message, "sandbox": self._ref.id, "secret": self._ref.secret}

    async def _client(self) -> LauncherClient:
        try:
            return await self._connections.get(self._ref.endpoint)
        except LauncherGone as error:
            raise SandboxGone(str(error)) from error
