"""One container, by its ref: any process of this host with root's rights attaches to it.

Invariants:
- All that is needed lies in the sandbox's folder, so nobody asks the provider; whoever lacks the secret is refused.
- A command runs below an `oci_exec` of the caller's own, which keeps the deadline and dies with the caller.
- `kill` ends the first process; its keeper removes the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
from contextlib import contextmanager, suppress
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.sandboxes.base import Command, ExecResult, Sandbox, SandboxUsage, Stream
from headrace.sandboxes.capture import OUTPUT_GRACE_S, OutputCapture, memory_file
from headrace.sandboxes.errors import (
    ExecTimeout,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    SpecRefused,
    Unsupported,
)
from headrace.sandboxes.images.folders import remove
from headrace.sandboxes.kernel import syscalls
from headrace.sandboxes.kernel.processes import parse_stat
from headrace.sandboxes.launcher.commands import EXIT_CANNOT_RUN, FileProblem, find_account
from headrace.sandboxes.launcher.wire import close_all
from headrace.sandboxes.local.client import open_null
from headrace.sandboxes.oci import cgroups as oci_cgroups
from headrace.sandboxes.oci import files as oci_files
from headrace.sandboxes.oci.bundle import command_process
from headrace.sandboxes.oci.keeper import FROZEN_MARK, LAYER, PID_FILE
from headrace.sandboxes.oci.process import CommandEnd, OciProcess, RunningCommand
from headrace.sandboxes.oci.runtime import OciRuntime, RuntimeKind
from headrace.sandboxes.unprotected.sandbox_folder import SandboxFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.sandboxes.base import ExecCommand, SandboxId, SandboxRef, SpawnCommand
    from headrace.sandboxes.launcher.commands import Account

STATE_FILE: Final = "sandbox.json"
PAUSED_MARK: Final = "paused"
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
"""Strays can be told from others' processes while no other command runs: see `processes`."""


class SandboxState(NamedTuple):
    """What whoever attaches must know; written once, before the boot."""

    runtime: str
    state_folder: str
    keeper_pid: int
    bash: str
    group: str
    base_id: int
    lowers: list[str]
    environment: dict[str, str]
    open_files: int


class OciSandbox(Sandbox):
    """Every method raises SandboxGone once it is dead, SecretRefused for a wrong secret."""

    def __init__(self, ref: SandboxRef) -> None:
        self._ref = ref
        self._home = Path(ref.endpoint)
        self._folder = SandboxFolder(self._home)

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    def _load(self) -> SandboxState:
        if not compare_digest(self._folder.secret(), self._ref.secret):
            raise SecretRefused(f"wrong secret for sandbox {self.id}")
        try:
            return SandboxState(**json.loads((self._home / STATE_FILE).read_bytes()))
        except FileNotFoundError as error:
            raise self._gone() from error

    def _running(self) -> SandboxState:
        state = self._load()
        if self._folder.frozen:
            raise SandboxGone(f"sandbox {self.id} runs no more commands: it is frozen")
        if self._first_process(state) is None:
            raise self._gone()
        return state

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self.id} is gone: killed, or its lease ended")

    def _first_process(self, state: SandboxState) -> int | None:
        """The pid of the sandbox's first process, for as long as its keeper is its parent."""
        try:
            pid = int((self._home / PID_FILE).read_text())
            entry = parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
        except (OSError, ValueError):
            return None
        return pid if entry.parent == state.keeper_pid and entry.state not in "ZX" else None

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`."""
        if command.exec_id is not None:
            raise Unsupported("exec_id: the oci provider remembers no results")
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
        """Owns the descriptor `source`."""
        try:
            state = self._running()
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
                end = await self._wait(running, timeout_s)
            stdout = await out.finish(OUTPUT_GRACE_S)
            stderr = await err.finish(OUTPUT_GRACE_S if not out.held else 0)
        if not end.timed_out and _may_be_dead(state, end.exit_code):
            self._running()
        if end.exit_code is None and not end.timed_out:
            raise SandboxError(f"the command's parent process died: {command.command[:200]!r}")
        return end, stdout, stderr, out.truncated or err.truncated

    async def _wait(self, running: RunningCommand, timeout_s: float) -> CommandEnd:
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_GRACE_S):
                return await running.wait()
        except TimeoutError:
            await self.kill()
            return CommandEnd(None, True, timeout_s)

    @contextmanager
    def _order(self, state: SandboxState, process: dict[str, Any], timeout_s: float | None) -> Iterator[dict[str, Any]]:
        """What `oci_exec` needs, with its files; they go when the command has ended."""
        name = f"exec-{secrets.token_hex(8)}"
        process_file, pid_file = self._home / f"{name}.json", self._home / f"{name}.pid"
        runtime = OciRuntime(RuntimeKind(state.runtime), Path(state.state_folder))
        detached = runtime.kind is RuntimeKind.RUNC
        words = ["exec", "--process", str(process_file)]
        if detached:
            group = oci_cgroups.sub_group_argument(name)
            words += ["--detach", "--ignore-paused", "--pid-file", str(pid_file), "--cgroup", group]
        else:
            words += ["--internal-pid-file", str(pid_file)]
        try:
            # Its environment may hold secrets.
            with open(process_file, "x", encoding="utf-8", opener=open_private) as file:
                file.write(json.dumps(process))
        except FileNotFoundError as error:
            raise self._gone() from error
        try:
            yield {
                "command": runtime.command(*words, self.id),
                "detached": detached,
                "pid_file": str(pid_file),
                "group": f"{oci_cgroups.folder('freezer', state.group)}/{name}" if detached else "",
                "inside": [] if detached else self._kill_inside(runtime, state, pid_file),
                "timeout_s": timeout_s,
            }
        finally:
            process_file.unlink(missing_ok=True)
            pid_file.unlink(missing_ok=True)

    def _kill_inside(self, runtime: OciRuntime, state: SandboxState, pid_file: Path) -> list[str]:
        script = runtime.command("exec", self.id, state.bash, "-c", oci_files.KILL_TREE, "bash")
        return ["/bin/sh", "-c", _KILL_INSIDE, "sh", str(pid_file), *script]

    async def _account(self, state: SandboxState, user: str) -> Account:
        """Raises FileProblem for a user that is not there."""
        if state.runtime == RuntimeKind.RUNC:
            pid = self._first_process(state)
            if pid is None:
                raise self._gone()
            return find_account(user, *(_read_inside(pid, name) for name in ("etc/passwd", "etc/group")))
        if user == "root":
            return find_account("0:0", "", "")._replace(name="root", home="/root")
        # gVisor's files are seen from the inside only.
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
        """See `Sandbox.spawn`. Raises Unsupported for a terminal, and with gVisor. What cannot run ends with 126."""
        state = self._running()
        if command.terminal is not None or state.runtime != RuntimeKind.RUNC:
            raise Unsupported("spawn: the oci provider has no terminals, and none of it with gVisor")
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
            running = await self._begin(state, process, (source, out_write, err_write), command.timeout_s)
        except BaseException:
            close_all(ours)
            raise
        streams = {Stream.STDOUT: out_read, Stream.STDERR: err_read}
        return OciProcess(running, stdin=sink, streams=streams, timeout_s=command.timeout_s, check=self._running)

    async def _begin(
        self, state: SandboxState, process: dict[str, Any], descriptors: tuple[int, ...], timeout_s: float | None
    ) -> RunningCommand:
        """Start a command and wait until it runs; a cancel meanwhile kills it."""
        with self._order(state, process, timeout_s) as order:
            running = await RunningCommand.start(order, descriptors)
            try:
                await running.begun.wait()
            except BaseException:
                await asyncio.shield(running.stop())
                raise
        return running

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
            said = stderr.decode(errors="replace").strip()
            raise SandboxFileError(said or f"file operation ended with {end.exit_code}")
        return stdout

    async def freeze(self) -> None:
        state = self._load()
        (self._home / FROZEN_MARK).touch()
        await self._end_first_process(state)

    async def pause(self) -> None:
        await self._set_paused("pause", paused=True)

    async def resume(self) -> None:
        await self._set_paused("resume", paused=False)

    async def _set_paused(self, word: str, *, paused: bool) -> None:
        state, mark = self._running(), self._home / PAUSED_MARK
        if state.runtime != RuntimeKind.RUNC:
            raise Unsupported(f"{word}: a paused gVisor still runs new commands")
        if mark.exists() == paused:
            return
        if not await OciRuntime(RuntimeKind(state.runtime), Path(state.state_folder)).call(word, self.id):
            self._running()
            raise SandboxError(f"sandbox {self.id} cannot {word}: the runtime refused")
        if paused:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    async def usage(self) -> SandboxUsage:
        state = self._running()
        if state.runtime != RuntimeKind.RUNC:
            raise Unsupported("usage: gVisor's processes are not counted")
        pid = self._first_process(state)
        try:
            counted = oci_cgroups.usage(state.group)
            disk = os.statvfs(f"/proc/{pid}/root")
        except FileNotFoundError as error:
            raise self._gone() from error
        return SandboxUsage(
            cpu_s=counted.cpu_s,
            memory_bytes=counted.memory_bytes,
            memory_limit_bytes=counted.memory_limit_bytes,
            disk_bytes=(disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            disk_limit_bytes=disk.f_blocks * disk.f_frsize,
            processes=counted.processes,
            cpus=counted.cpus,
            oom_kills=counted.oom_kills,
        )

    async def renew(self, ttl_s: float) -> None:
        self._load()
        self._folder.set_deadline(asyncio.get_running_loop().time() + ttl_s)

    async def kill(self) -> None:
        try:
            state = self._load()
        except SandboxGone:
            return
        frozen = self._folder.frozen
        (self._home / FROZEN_MARK).unlink(missing_ok=True)
        (self._home / "secret").unlink(missing_ok=True)
        if frozen:
            await self._drop_layer(state)
        else:
            await self._end_first_process(state)

    async def _end_first_process(self, state: SandboxState) -> None:
        pid = self._first_process(state)
        if pid is None:
            return
        oci_cgroups.thaw(state.group)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            if self._first_process(state) == pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def _drop_layer(self, state: SandboxState) -> None:
        """A frozen sandbox has no process: its layer lies in the mount namespace of the keeper."""
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--mount=/proc/{state.keeper_pid}/ns/mnt", "umount", "--lazy", str(self._home / LAYER)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        await process.wait()
        await asyncio.to_thread(remove, self._home)


def open_private(path: str, flags: int) -> int:
    """An opener for files that only this user reads."""
    return os.open(path, flags, 0o600)


def _may_be_dead(state: SandboxState, exit_code: int | None) -> bool:
    """Whether a command may have ended so because its sandbox did; gVisor gives no certain code then."""
    return exit_code in (None, EXIT_CANNOT_RUN, 128 + signal.SIGKILL) or (
        exit_code != 0 and state.runtime == RuntimeKind.RUNSC
    )


def _read_inside(pid: int, name: str) -> str:
    """A small regular file of a container, opened within its root; empty when there is none."""
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
