"""Interfaces of sandbox providers, sandboxes and processes, with their messages.

Invariants of every provider:
- A ref is frozen and picklable; its holder attaches to the sandbox directly, without Ray.
- `kill` is idempotent and ends the whole process tree.
- A command never outlives its timeout; a timeout is a typed error, never a result.
- All output and files of a sandbox are data: limited in size, and never resolved as a path of the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NewType, NoReturn, Protocol, runtime_checkable

from headrace.sandboxes.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

SandboxId = NewType("SandboxId", str)
ImageRef = NewType("ImageRef", str)
"""A value of `SandboxSpec.image`: `host`, the path of a root file system or archive, `debootstrap:SUITE`, or a
snapshot."""

DEFAULT_MAX_OUTPUT_BYTES = 1 << 20


class Network(StrEnum):
    """Network access of a sandbox."""

    NONE = "none"
    """Only a loopback interface of its own."""
    HOST = "host"
    """The host's network; only with the subprocess provider, which gives no protection."""


class Feature(StrEnum):
    """An optional feature of a provider; a call that needs a missing one raises Unsupported."""

    FREEZE = "freeze"
    """`Sandbox.freeze` and FrozenMount."""
    SPAWN = "spawn"
    EXEC_ID = "exec_id"
    """`Sandbox.exec` runs a command once for each exec_id."""
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    """`Sandbox.pause` and `resume`."""
    EXPOSE = "expose"
    TERMINAL = "terminal"
    """`Sandbox.spawn` with a terminal."""
    USAGE = "usage"
    FOLDERS = "folders"
    """`SandboxSpec.folders`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMount:
    """A data path of a frozen sandbox, mounted read-only, nosuid, nodev and noexec in a new one."""

    source: SandboxId
    path: str
    """Absolute path in the frozen sandbox; resolved without following symbolic links."""
    target: str
    """Absolute path in the new sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFolder:
    """A folder of the provider's host, mounted read-only, nosuid and nodev in a sandbox of any image; its programs can
    be run. All sandboxes share its files, without copies. A snapshot does not contain it."""

    source: str
    """Absolute path on the host, on a file system with id-mapped mounts (ext4, xfs, btrfs, tmpfs)."""
    target: str
    """Absolute path in the sandbox, outside of its system's folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A sandbox to boot. A limit of None is the provider's default. `ttl_s` is the lease, at whose end the sandbox is
    killed unless it was renewed."""

    image: str = "host"
    cpu: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None
    network: Network = Network.NONE
    ttl_s: float = 300.0
    idempotency_key: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[FrozenMount, ...] = ()
    folders: tuple[HostFolder, ...] = ()


def refuse_folders(spec: SandboxSpec, provider: str) -> None:
    """Refuse a spec with folders, for providers without Feature.FOLDERS. Raises Unsupported."""
    if spec.folders:
        targets = ", ".join(folder.target for folder in spec.folders)
        raise Unsupported(f"folders ({targets}): the {provider} provider shows none of its host; put them in the image")


AVOID_LABEL: Final = "headrace-avoid"
"""A label with endpoints, separated by blanks, that a provider of several hosts should avoid for the sandbox."""
_HOSTS_AT_ENDPOINTS: Final = frozenset({"remote", "simulated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRef:
    """Address of and access to one sandbox: `endpoint` is a socket path or URL, `secret` opens only this sandbox."""

    provider: str
    id: SandboxId
    endpoint: str
    secret: str = field(repr=False)

    @property
    def host(self) -> str:
        """The host for reports of failures: the endpoint if that names a host, otherwise the provider."""
        return self.endpoint if self.provider in _HOSTS_AT_ENDPOINTS else self.provider


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One row of `list`. `expires_in_s` is the remaining time of its lease."""

    id: SandboxId
    state: str
    expires_in_s: float
    labels: Mapping[str, str]
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A finished command. `stdout` and `stderr` are the first `max_output_bytes` of each; `truncated` if there was
    more."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    duration_s: float


class Stream(StrEnum):
    """Source of a piece of output."""

    STDOUT = "stdout"
    STDERR = "stderr"
    TERMINAL = "terminal"
    """Both streams, in the order in which a terminal shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A piece of output, at most 64 KiB."""

    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize:
    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPort:
    """A TCP service of the host."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxUsage:
    """Current resource usage of a sandbox; `cpu_s` is counted since its boot. A limit of None means no limit."""

    cpu_s: float
    memory_bytes: int
    memory_limit_bytes: int | None
    disk_bytes: int
    disk_limit_bytes: int | None
    processes: int
    cpus: float | None
    oom_kills: int
    """Processes killed because `memory_limit_bytes` was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with its user, its additional environment and its working folder."""

    command: str | Sequence[str]
    """A text for `bash -c`, or a program and its arguments."""
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    """The image's working folder when None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecCommand(Command):
    """The arguments of `Sandbox.exec`, as providers get them."""

    command: str
    stdin: bytes | None = None
    timeout_s: float
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES
    """Limit of each of the two output streams."""
    exec_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnCommand(Command):
    """The arguments of `Sandbox.spawn`, as providers get them."""

    stdin: bool = False
    terminal: TerminalSize | None = None
    timeout_s: float | None = None


class Process(Protocol):
    """A command that runs in the background. It ends with its sandbox, at its timeout, or by itself. If its output is
    not read, it blocks once its pipe is full."""

    @property
    def pid(self) -> int:
        """The pid of the command inside the sandbox."""
        ...

    def output(self) -> AsyncIterator[Output]:
        """Yield the output, once, for one reader. Ends with both streams, or 0.2 s after the command if a daemon has
        them open. A slow reader slows the command down, because only its pipe buffers output."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Write to standard input; waits while the command does not read. Raises SandboxFileError if it is closed."""
        ...

    async def close_stdin(self) -> None:
        """Close standard input. Idempotent. In a terminal this sends Ctrl-D."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to the command, SIGKILL to its whole process tree. Does nothing once the command has ended."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Change the size of the terminal. Raises SpecRefused without one."""
        ...

    async def wait(self) -> int:
        """Wait for the exit code, which is 128 + n after signal n. May be repeated. Raises ExecTimeout, SandboxGone."""
        ...


class Sandbox(ABC):
    """A running sandbox. Every method raises SandboxGone once it is dead, and optional methods raise Unsupported unless
    a provider overrides them."""

    @property
    @abstractmethod
    def id(self) -> SandboxId: ...

    async def exec(
        self,
        command: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
        exec_id: str | None = None,
    ) -> ExecResult:
        """Run `bash -c command` in a fresh process, in the image's working folder (`/workspace` of `host`) unless `cwd`
        names another.

        A command that is ended by signal n has the exit code 128 + n; an unknown user or folder gives 126 and a line on
        stderr. A second call with the same `exec_id`, from any holder of the ref, runs nothing: it waits for the first
        result, or returns it. Raises ExecTimeout (the process tree is dead), SandboxGone, ExecResultLost, Unsupported.
        """
        return await self.run_command(
            ExecCommand(
                command=command,
                user=user,
                env=dict(env or {}),
                cwd=cwd,
                stdin=stdin,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                exec_id=exec_id,
            )
        )

    @abstractmethod
    async def run_command(self, command: ExecCommand) -> ExecResult:
        """Run a command and wait for its end; the provider's part of `exec`."""

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
        timeout_s: float | None = None,
    ) -> Process:
        """Start a command and return at once: a text runs as with `bash -c`, a sequence is a program and its arguments.

        Without `stdin` its standard input is empty. With a terminal all three streams are that terminal's. Without
        `timeout_s` it runs until its sandbox ends. Raises SandboxGone, Unsupported.
        """
        return await self.start_process(
            SpawnCommand(
                command=command if isinstance(command, str) else list(command),
                user=user,
                env=dict(env or {}),
                cwd=cwd,
                stdin=stdin,
                terminal=terminal,
                timeout_s=timeout_s,
            )
        )

    async def start_process(self, command: SpawnCommand) -> Process:
        """Start a command without waiting for it; the provider's part of `spawn`."""
        self._refuse("spawn a command that is not waited for")

    @abstractmethod
    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        """Return the content of a regular file. Raises SandboxFileError (missing, not regular, larger than
        `max_bytes`)."""

    @abstractmethod
    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        """Create or replace a file and its parent directories, from bytes or from a file of the host, which is not
        loaded into memory. Raises SandboxFileError."""

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        """`write` for several files, in one round trip where the provider can; on an error those before it are
        written."""
        for path, data in files.items():
            await self.write(path, data, user=user)

    async def freeze(self) -> None:
        """Kill every process but retain the file layer, which FrozenMount can show to a clean sandbox. Idempotent."""
        self._refuse("freeze")

    async def pause(self) -> None:
        """Stop every process where it is: processes take no processor time and commands wait. The lease still runs.
        Idempotent."""
        self._refuse("pause")

    async def resume(self) -> None:
        """Continue a paused sandbox. Idempotent."""
        self._refuse("resume")

    async def snapshot(self) -> ImageRef:
        """Make an image of the file layer as it is now and end the sandbox: clones share the layer without a copy."""
        self._refuse("snapshot")

    def expose(self, port: int, target: HostPort, prefix: str) -> AbstractAsyncContextManager[None]:
        """Make a service of the host available at the sandbox's own 127.0.0.1:`port` while the context lasts. Only HTTP
        requests for URL paths below `prefix` pass, all others get 403. Raises SpecRefused (the port is taken)."""
        self._refuse(f"expose port {port} for {target.host}:{target.port}{prefix}")

    async def usage(self) -> SandboxUsage:
        """Return the current resource usage."""
        self._refuse("usage")

    @abstractmethod
    async def renew(self, ttl_s: float) -> None:
        """Make the lease end `ttl_s` seconds from now. Raises SandboxGone; a frozen sandbox has a lease too."""

    @abstractmethod
    async def kill(self) -> None:
        """End the whole process tree and drop the file layer. Idempotent."""

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} cannot {what}: use a provider that can (README, Sandboxes)")


@runtime_checkable
class ProgramRunner(Protocol):
    """A sandbox that runs Python programs of headrace without an interpreter in its image."""

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
        """Run a Python text as `python -I -S -c program arguments...` would, in `/`, in a process that has the
        interpreter of headrace already; it may import what `launcher.commands.PRELOADED` names, and nothing of the
        image. Raises ExecTimeout, SandboxGone."""
        ...


class SandboxProvider(Protocol):
    """Provider of sandboxes. `create` with a known idempotency key returns the existing sandbox."""

    @property
    def features(self) -> frozenset[Feature]: ...

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox. Raises SandboxError; Unsupported if the spec needs a feature that the provider lacks."""
        ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def list(self) -> list[SandboxInfo]: ...

    async def destroy(self, sandbox: SandboxId) -> None:
        """Kill a sandbox by its id, for those that `list` shows but whose ref is unknown. Idempotent."""
        ...

    async def aclose(self) -> None: ...
