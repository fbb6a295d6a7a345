# ruff: noqa: ASYNC220, ASYNC230, ASYNC240 - local files of a few bytes, and a spawn that takes a millisecond
"""Provider for `--sandbox subprocess`: plain processes on the host in a temporary folder, without protection.

Invariants:
- `/workspace`, `/home`, `/tmp`, `/root` and the targets of frozen mounts are folders below the sandbox's own folder.
  They are mapped by *text*: such a path in a command, its environment or its standard input is replaced by the real
  path, and the real path is replaced by the short one in the output. File contents are unchanged, and a path that is
  assembled at run time is not mapped: `$WORKSPACE` is the real path.
- Every process has the sandbox's folder in its environment; kill and freeze search for that mark. A process that clears
  its environment and leaves its session escapes.
- `user` is ignored: everything runs as the user of this program.
- A ref's endpoint is the folder, so any process on the host can attach. The provider's process enforces the lease; if
  it is killed with SIGKILL, folders and processes remain.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import Final, Self

from headrace.sandboxes.base import (
    ExecCommand,
    ExecResult,
    Feature,
    Sandbox,
    SandboxId,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    refuse_extras,
)
from headrace.sandboxes.errors import (
    ExecTimeout,
    ImageUnknown,
    SandboxFileError,
    SandboxGone,
    SecretRefused,
    Unsupported,
)
from headrace.sandboxes.host.capture import OUTPUT_GRACE_S, OutputCapture, memory_file
from headrace.sandboxes.host.leftovers import LABEL_VARIABLE
from headrace.sandboxes.host.private_folders import new_private, temporary_folder
from headrace.sandboxes.launcher.commands import EXIT_CANNOT_RUN, SEARCH_PATH
from headrace.sandboxes.local.client import open_null
from headrace.sandboxes.unprotected.mapped_paths import PathMap, open_regular
from headrace.sandboxes.unprotected.marked_processes import kill_marked
from headrace.sandboxes.unprotected.sandbox_folder import MARK, SandboxFolder, make_sandbox_folder

PROVIDER: Final = "subprocess"
WARNING: Final = (
    "--sandbox subprocess protects nothing: the agent's commands run as your own user. They can read and change every "
    "file that you can, use the network, see and signal your processes, use memory, processors and disk without limit, "
    "and outlive a killed run. Frozen data is a copy. Use it only with agents and tasks you trust."
)
"""Warning that the command line prints when this provider is chosen."""

_EXEC_MARK: Final = "HEADRACE_EXEC"


class SubprocessProvider:
    """Provider of subprocess sandboxes; an async context manager whose `aclose` ends every sandbox that it made."""

    features = frozenset({Feature.FREEZE})
    protects: tuple[str, ...] = ()
    warning: str = WARNING

    def __init__(self, folder: Path | None = None, *, label: str = "") -> None:
        self._parent = folder
        self._label = label
        self._folder: Path | None = None
        self._by_key: dict[str, SandboxRef] = {}
        self._specs: dict[SandboxId, SandboxSpec] = {}
        self._timers: dict[SandboxId, asyncio.TimerHandle] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Make a sandbox. Limits and the network of the spec are ignored. Raises ImageUnknown, SpecRefused,
        FrozenPathRefused."""
        refuse_extras(spec, PROVIDER)
        if spec.image != "host":
            raise ImageUnknown(f"image {spec.image!r}: the subprocess provider has only `host`")
        known = self._by_key.get(spec.idempotency_key)
        if known is not None and Path(known.endpoint).exists():
            return known
        # Made at the first create, because a provider that only attaches needs no folder.
        if self._folder is None:
            folder = new_private(self._parent or temporary_folder(), "headrace-unprotected-")
            # realpath: the mapping of output back to short paths needs the path that `pwd` prints.
            self._folder = Path(os.path.realpath(folder))
        sandbox_id = SandboxId(secrets.token_hex(8))
        home = self._folder / sandbox_id
        ref = SandboxRef(provider=PROVIDER, id=sandbox_id, endpoint=str(home), secret=secrets.token_hex(16))
        try:
            make_sandbox_folder(home, ref.secret, spec, self._label)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        if spec.idempotency_key:
            self._by_key[spec.idempotency_key] = ref
        self._specs[sandbox_id] = spec
        self._watch_lease(ref)
        return ref

    def _watch_lease(self, ref: SandboxRef) -> None:
        """End the sandbox when its lease has ended. The deadline is read again each time, because other processes may
        have renewed the lease."""
        state = SandboxFolder(Path(ref.endpoint))
        try:
            rest_s = state.deadline() - time.monotonic()
        except SandboxGone:
            self._forget(ref)
            return
        if rest_s <= 0:
            state.destroy()
            self._forget(ref)
            return
        self._timers[ref.id] = asyncio.get_running_loop().call_later(rest_s, self._watch_lease, ref)

    def _forget(self, ref: SandboxRef) -> None:
        self._timers.pop(ref.id, None)
        spec = self._specs.pop(ref.id, None)
        if spec is not None:
            self._by_key.pop(spec.idempotency_key, None)

    async def attach(self, ref: SandboxRef) -> SubprocessSandbox:
        return SubprocessSandbox(ref)

    async def list(self) -> list[SandboxInfo]:
        infos: list[SandboxInfo] = []
        if self._folder is None:
            return infos
        for sandbox_id, spec in self._specs.items():
            state = SandboxFolder(self._folder / sandbox_id)
            with suppress(SandboxGone):
                infos.append(
                    SandboxInfo(
                        id=sandbox_id,
                        state="frozen" if state.frozen else "running",
                        expires_in_s=max(0.0, state.deadline() - time.monotonic()),
                        labels=dict(spec.labels),
                        idempotency_key=spec.idempotency_key,
                    )
                )
        return infos

    async def destroy(self, sandbox: SandboxId) -> None:
        if self._folder is not None and sandbox in self._specs:
            with suppress(SandboxGone):
                SandboxFolder(self._folder / sandbox).destroy()

    async def aclose(self) -> None:
        """Kill all processes and remove all folders. Idempotent."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._specs.clear()
        self._by_key.clear()
        folder, self._folder = self._folder, None
        if folder is None:
            return
        for home in folder.iterdir():
            SandboxFolder(home).destroy()
        shutil.rmtree(folder, ignore_errors=True)


class SubprocessSandbox(Sandbox):
    """A sandbox that consists of a folder and the processes with its mark. Every method raises SandboxGone once it is
    dead."""

    def __init__(self, ref: SandboxRef) -> None:
        self._ref = ref
        self._state = SandboxFolder(Path(ref.endpoint))

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    def _check(self) -> None:
        if not compare_digest(self._state.secret(), self._ref.secret):
            raise SecretRefused(f"wrong secret for sandbox {self.id}")

    def _running(self) -> PathMap:
        self._check()
        if self._state.frozen:
            raise SandboxGone(f"sandbox {self.id} can run no more commands: it is frozen")
        return PathMap(self._state.tree, self._state.mapped())

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`; `user` is ignored."""
        if command.exec_id is not None:
            raise Unsupported("exec_id is not supported: the subprocess provider does not store results")
        paths = self._running()
        started = time.monotonic()
        (self._state.home / "used").touch()
        async with OutputCapture(command.max_output_bytes) as out, OutputCapture(command.max_output_bytes) as err:
            source = open_null() if command.stdin is None else memory_file(paths.to_real(command.stdin))
            descriptors = (source, out.write_end, err.write_end)
            environment = {
                "PATH": SEARCH_PATH,
                "HOME": str(self._state.tree / "root"),
                "USER": "root",
                "LOGNAME": "root",
                "LANG": "C.UTF-8",
                "TMPDIR": str(self._state.tree / "tmp"),
                "WORKSPACE": str(self._state.tree / "workspace"),
                **{name: paths.text_to_real(value) for name, value in command.env.items()},
                MARK: str(self._state.home),
                LABEL_VARIABLE: self._state.label(),
                _EXEC_MARK: secrets.token_hex(8),
            }
            code = await self._run(paths, command, environment, descriptors)
            stdout = await out.finish(OUTPUT_GRACE_S)
            stderr = await err.finish(OUTPUT_GRACE_S if not out.held else 0)
        if code == -signal.SIGKILL and not self._state.home.exists():
            raise SandboxGone(f"sandbox {self.id} died while the command was running")
        return ExecResult(
            exit_code=code if code >= 0 else 128 - code,
            stdout=paths.to_short(stdout),
            stderr=paths.to_short(stderr),
            truncated=out.truncated or err.truncated,
            duration_s=time.monotonic() - started,
        )

    async def _run(
        self, paths: PathMap, command: ExecCommand, environment: dict[str, str], descriptors: tuple[int, int, int]
    ) -> int:
        folder = paths.real_path(command.cwd) if command.cwd is not None else self._state.tree / "workspace"
        try:
            process = subprocess.Popen(
                ["/bin/bash", "-c", paths.text_to_real(command.command)],
                stdin=descriptors[0],
                stdout=descriptors[1],
                stderr=descriptors[2],
                cwd=folder if folder.is_dir() or command.cwd is not None else self._state.tree,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            os.write(descriptors[2], f"cannot run the command: {error}\n".encode())
            return EXIT_CANNOT_RUN
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            async with asyncio.timeout(command.timeout_s):
                await _exited(process)
        except TimeoutError as error:
            text = f"command ran longer than timeout_s={command.timeout_s} and was killed: {command.command[:200]!r}"
            raise ExecTimeout(text) from error
        finally:
            if process.poll() is None:
                kill_marked(f"{_EXEC_MARK}={environment[_EXEC_MARK]}")
                process.kill()
                process.wait()
        return process.returncode

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        real = self._running().real_path(path)
        try:
            with open(real, "rb", opener=open_regular) as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise SandboxFileError(f"{path}: {error.strerror}") from error
        if len(data) > max_bytes:
            raise SandboxFileError(f"{path}: more than {max_bytes} bytes")
        return data

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        content = data if isinstance(data, bytes) else await asyncio.to_thread(data.read_bytes)
        await self.write_many({path: content}, user=user)

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        paths = self._running()
        for path, data in files.items():
            real = paths.real_path(path)
            try:
                real.parent.mkdir(parents=True, exist_ok=True)
                with open(real, "wb", opener=open_regular) as file:
                    file.truncate(0)
                    file.write(data)
            except OSError as error:
                raise SandboxFileError(f"{path}: {error.strerror}") from error

    async def freeze(self) -> None:
        self._check()
        (self._state.home / "frozen").touch()
        self._state.kill_processes()

    async def renew(self, ttl_s: float) -> None:
        self._check()
        self._state.set_deadline(time.monotonic() + ttl_s)

    async def kill(self) -> None:
        with suppress(SandboxGone):
            self._check()
            self._state.destroy()


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end using a pidfd, which, unlike a pipe, ignores daemons that outlive the process."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()
