"""Sandbox in an OCI container, to which any root process on this host can attach with its ref.

Invariants:
- A command runs under the caller's `oci.exec` process, which enforces the timeout and dies with the caller.
- `kill` ends the first process; the keeper removes everything else.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from headrace.sandboxes.base import (
    Command,
    ExecCommand,
    ExecResult,
    Sandbox,
    SandboxId,
    SandboxRef,
    SandboxUsage,
    SpawnCommand,
    Stream,
)
from headrace.sandboxes.errors import ExecTimeout, SandboxError, SandboxFileError, SandboxGone, SpecRefused, Unsupported
from headrace.sandboxes.host.capture import OUTPUT_GRACE_S, OutputCapture, memory_file
from headrace.sandboxes.host.child_environment import child_environment
from headrace.sandboxes.images.folders import remove
from headrace.sandboxes.launcher.commands import EXIT_CANNOT_RUN, Account, FileProblem, find_account
from headrace.sandboxes.launcher.wire import close_all
from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.local.client import open_null
from headrace.sandboxes.oci import cgroups as oci_cgroups
from headrace.sandboxes.oci import files as oci_files
from headrace.sandboxes.oci.bundle import command_process
from headrace.sandboxes.oci.container import PAUSED_MARK, Container, ContainerState, open_private
from headrace.sandboxes.oci.exec import Order
from headrace.sandboxes.oci.keeper import FROZEN_MARK, LAYER
from headrace.sandboxes.oci.process import CommandEnd, OciProcess, RunningCommand

_FILE_TIMEOUT_S: Final = 60.0
_ANSWER_GRACE_S: Final = 20.0
_MAX_ACCOUNT_BYTES: Final = 1 << 20
_INSIDE: Final = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


_KILL_INSIDE: Final = """
file=$1 && shift && pid=$(cat "$file") || exit
set -- "$@" "$pid"
others=$(ls "${file%/*}" | grep -c '^exec-.*[.]json$')
[ "$others" -gt 1 ] || set -- "$@" strays
exec "$@"
"""
"""Strays are killed only while no other command runs, because only then can they be distinguished from other
processes."""


class OciSandbox(Sandbox):
    """A sandbox in a container. Every method raises SandboxGone once it is dead, SecretRefused for a wrong secret."""

    def __init__(self, ref: SandboxRef) -> None:
        self._ref = ref
        self._container = Container(ref)

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`."""
        if command.exec_id is not None:
            raise Unsupported("exec_id is not supported: the oci provider does not store results")
        source = open_null() if command.stdin is None else memory_file(command.stdin)
        end, stdout, stderr, truncated = await self._run(
            command, source, timeout_s=command.timeout_s, max_bytes=command.max_output_bytes
        )
        if end.timed_out:
            text = f"command ran longer than timeout_s={command.timeout_s} and was killed: {command.command[:200]!r}"
            raise ExecTimeout(text)
        assert end.exit_code is not None
        return ExecResult(
            exit_code=end.exit_code, stdout=stdout, stderr=stderr, truncated=truncated, duration_s=end.duration_s
        )

    async def _run(
        self, command: Command, source: int, *, timeout_s: float, max_bytes: int
    ) -> tuple[CommandEnd, bytes, bytes, bool]:
        """Run a command with the descriptor `source` as standard input; the descriptor is closed here."""
        try:
            state = self._container.running()
            account = await self._account(state, command.user)
        except FileProblem as error:
            os.close(source)
            message = f"cannot run the command: {error}\n".encode()
            return CommandEnd(EXIT_CANNOT_RUN, False, 0.0), b"", message, False
        except BaseException:
            os.close(source)
            raise
        process = command_process(account, state.bash, command, state.environment, state.open_files)
        async with OutputCapture(max_bytes) as out, OutputCapture(max_bytes) as err:
            with self._order(state, process, timeout_s) as order:
                running = await RunningCommand.start(order, (source, out.write_end, err.write_end))
                try:
                    async with asyncio.timeout(timeout_s + _ANSWER_GRACE_S):
                        end = await running.wait()
                except TimeoutError:
                    await self.kill()
                    end = CommandEnd(None, True, timeout_s)
            stdout = await out.finish(OUTPUT_GRACE_S)
            stderr = await err.finish(OUTPUT_GRACE_S if not out.held else 0)
        # Exit codes with which a command may end because its sandbox died; gVisor gives no certain one then.
        if not end.timed_out and (
            end.exit_code in (None, EXIT_CANNOT_RUN, 128 + signal.SIGKILL) or (end.exit_code != 0 and not state.is_runc)
        ):
            self._container.running()
        if end.exit_code is None and not end.timed_out:
            raise SandboxError(f"the command's parent process died: {command.command[:200]!r}")
        return end, stdout, stderr, out.truncated or err.truncated

    @contextmanager
    def _order(self, state: ContainerState, process: dict[str, Any], timeout_s: float | None) -> Iterator[Order]:
        """Create the files for `oci.exec` and yield its order; the files are removed once the command has ended."""
        name, home = f"exec-{secrets.token_hex(8)}", self._container.home
        process_file, pid_file = home / f"{name}.json", home / f"{name}.pid"
        runtime = state.oci_runtime()
        words = ["exec", "--process", str(process_file)]
        inside: list[str] = []
        if state.is_runc:
            group = oci_cgroups.sub_group_argument(name)
            words += ["--detach", "--ignore-paused", "--pid-file", str(pid_file), "--cgroup", group]
        else:
            words += ["--internal-pid-file", str(pid_file)]
            kill = runtime.command("exec", self.id, state.bash, "-c", oci_files.KILL_TREE, "bash")
            inside = ["/bin/sh", "-c", _KILL_INSIDE, "sh", str(pid_file), *kill]
        try:
            # The environment may contain secrets.
            with open(process_file, "x", encoding="utf-8", opener=open_private) as file:
                file.write(json.dumps(process))
        except FileNotFoundError as error:
            raise self._container.gone() from error
        try:
            yield {
                "command": runtime.command(*words, self.id),
                "detached": state.is_runc,
                "pid_file": str(pid_file),
                "group": f"{oci_cgroups.folder('freezer', state.group)}/{name}" if state.is_runc else "",
                "inside": inside,
                "timeout_s": timeout_s,
            }
        finally:
            process_file.unlink(missing_ok=True)
            pid_file.unlink(missing_ok=True)

    async def _account(self, state: ContainerState, user: str) -> Account:
        """Look up a user of the sandbox. Raises FileProblem for an unknown one."""
        if state.is_runc:
            pid = self._container.first_process(state)
            if pid is None:
                raise self._container.gone()
            return find_account(user, *(_read_inside(pid, name) for name in ("etc/passwd", "etc/group")))
        if user == "root":
            return find_account("0:0", "", "")._replace(name="root", home="/root")
        # gVisor's files are visible from inside only.
        end, stdout, _, _ = await self._run(
            Command(command=oci_files.ACCOUNTS),
            open_null(),
            timeout_s=_FILE_TIMEOUT_S,
            max_bytes=2 * _MAX_ACCOUNT_BYTES,
        )
        if end.exit_code != 0:
            raise FileProblem(f"user {user!r}: /etc/passwd cannot be read")
        passwd, group, *_ = [*stdout.decode(errors="replace").split("\0"), "", ""]
        return find_account(user, passwd, group)

    async def start_process(self, command: SpawnCommand) -> OciProcess:
        """See `Sandbox.spawn`. Raises Unsupported for a terminal, and with gVisor. A command that cannot run ends with
        126."""
        state = self._container.running()
        if command.terminal is not None or not state.is_runc:
            raise Unsupported(
                "spawn: the oci provider supports no terminals and, with gVisor, no background commands (use runc)"
            )
        try:
            account = await self._account(state, command.user)
        except FileProblem as error:
            raise SpecRefused(f"cannot run the command: {error}") from error
        process = command_process(account, state.bash, command, state.environment, state.open_files)
        source, sink = os.pipe2(os.O_CLOEXEC) if command.stdin else (open_null(), -1)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        ours = [descriptor for descriptor in (sink, out_read, err_read) if descriptor >= 0]
        try:
            with self._order(state, process, command.timeout_s) as order:
                running = await RunningCommand.start(order, (source, out_write, err_write))
                try:
                    await running.begun.wait()
                except BaseException:
                    await asyncio.shield(running.stop())
                    raise
        except BaseException:
            close_all(ours)
            raise
        streams = {Stream.STDOUT: out_read, Stream.STDERR: err_read}
        return OciProcess(
            running, stdin=sink, streams=streams, timeout_s=command.timeout_s, check=self._container.running
        )

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        command = ["bash", "-c", oci_files.READ, "bash", path, str(max_bytes + 1)]
        data = await self._file_operation(command, open_null(), user, max(max_bytes + 1, 4096))
        if len(data) > max_bytes:
            raise SandboxFileError(f"{path}: more than {max_bytes} bytes")
        return data

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        if isinstance(data, bytes):
            source = memory_file(data)
        else:
            source = await asyncio.to_thread(os.open, data, os.O_RDONLY | os.O_CLOEXEC)
        await self._file_operation(["bash", "-c", oci_files.WRITE, "bash", path], source, user, 4096)

    async def _file_operation(self, words: list[str], source: int, user: str, max_bytes: int) -> bytes:
        command = Command(command=words, user=user, cwd="/")
        end, stdout, stderr, _ = await self._run(command, source, timeout_s=_FILE_TIMEOUT_S, max_bytes=max_bytes)
        if end.timed_out:
            raise SandboxFileError(f"file operation took longer than {_FILE_TIMEOUT_S} s")
        if end.exit_code != 0:
            message = stderr.decode(errors="replace").strip()
            raise SandboxFileError(message or f"file operation ended with {end.exit_code}")
        return stdout

    async def freeze(self) -> None:
        state = self._container.load()
        (self._container.home / FROZEN_MARK).touch()
        await self._container.end_first_process(state)

    async def pause(self) -> None:
        await self._set_paused("pause", paused=True)

    async def resume(self) -> None:
        await self._set_paused("resume", paused=False)

    async def _set_paused(self, word: str, *, paused: bool) -> None:
        state, mark = self._container.running(), self._container.home / PAUSED_MARK
        if not state.is_runc:
            raise Unsupported(f"{word} is not supported: a paused gVisor sandbox still runs new commands")
        if mark.exists() == paused:
            return
        if not await state.oci_runtime().call(word, self.id):
            self._container.running()
            raise SandboxError(f"cannot {word} sandbox {self.id}: the runtime refused")
        if paused:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    async def usage(self) -> SandboxUsage:
        state = self._container.running()
        if not state.is_runc:
            raise Unsupported("usage is not supported: gVisor's processes are not counted")
        pid = self._container.first_process(state)
        try:
            counted = oci_cgroups.usage(state.group)
            disk = os.statvfs(f"/proc/{pid}/root")
        except FileNotFoundError as error:
            raise self._container.gone() from error
        return SandboxUsage(
            **counted._asdict(),
            disk_bytes=(disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            disk_limit_bytes=disk.f_blocks * disk.f_frsize,
        )

    async def renew(self, ttl_s: float) -> None:
        self._container.load()
        self._container.folder.set_deadline(asyncio.get_running_loop().time() + ttl_s)

    async def kill(self) -> None:
        home = self._container.home
        try:
            state = self._container.load()
        except SandboxGone:
            return
        frozen = self._container.folder.frozen
        (home / FROZEN_MARK).unlink(missing_ok=True)
        (home / "secret").unlink(missing_ok=True)
        if not frozen:
            await self._container.end_first_process(state)
            return
        # A frozen sandbox has no process: its layer is mounted in the mount namespace of the keeper.
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--mount=/proc/{state.keeper_pid}/ns/mnt", "umount", "--lazy", str(home / LAYER)),
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(),
        )
        await process.wait()
        await asyncio.to_thread(remove, home)


def _read_inside(pid: int, name: str) -> str:
    """Return the content of a small regular file in a container, opened within its root; empty if there is none."""
    with suppress(OSError):
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = syscalls.open_resolved(root, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, _INSIDE)
        finally:
            os.close(root)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(_MAX_ACCOUNT_BYTES).decode(errors="replace")
    return ""
