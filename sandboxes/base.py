"""Interfaces of sandbox providers, sandboxes and processes, and the data types that they exchange.

Invariants of every provider:
- A ref is frozen and picklable; its holder attaches to the sandbox directly, without Ray.
- `kill` is idempotent and ends the whole process tree.
- A command never outlives its timeout; a timeout is a typed error, never a result.
- A sandbox's output and files are treated as data: limited in size, and never resolved as paths on the host.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NewType, NoReturn, Protocol, runtime_checkable

from headrace.sandboxes.errors import Unsupported

SandboxId = NewType("SandboxId", str)
ImageRef = NewType("ImageRef", str)
"""A value of `SandboxSpec.image`: `host`, the path of a root file system or archive, `debootstrap:SUITE`, or a
snapshot."""

DEFAULT_MAX_OUTPUT_BYTES = 1 << 20
MAX_REMOTE_OUTPUT_BYTES = 64 << 20
"""Largest `max_output_bytes` over the exec API; remote sandboxes lower greater ones to it."""


class Network(StrEnum):
    """Network access of a sandbox."""

    NONE = "none"
    """Only the sandbox's own loopback interface."""
    HOST = "host"
    """The host's network, for steps of image builds where the operator allows it."""


class Feature(StrEnum):
    """An optional feature of a provider. Calls that need a feature raise Unsupported if the provider lacks it."""

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
    GUEST = "guest"
    """`SandboxSpec.guest`."""
    PORTS = "ports"
    """`Sandbox.tcp_socket`."""


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
    """A folder on the provider's host, mounted read-only, nosuid and nodev in a sandbox, whatever its image. Programs
    in it can be run. All sandboxes share its files without copying them. A snapshot does not include it."""

    source: str
    """Absolute path on the host, on a file system with id-mapped mounts (ext4, xfs, btrfs, tmpfs)."""
    target: str
    """Absolute path in the sandbox, outside its system folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """What E2B's clients expect in a sandbox whatever its image: an account, files and the program `sudo`. An image's
    own account of that name is kept."""

    user: str = "user"
    """Name of the account, with id 1000 and the home folder `/home/NAME`."""
    sudo: bool = True
    """Let the account run commands as root with `sudo`. It is never set for a rollout: a verifier that checks a sandbox
    in which the agent was root can trust nothing there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents by absolute path, readable by every user."""

    def to_json(self) -> dict[str, object]:
        return {"user": self.user, "sudo": self.sudo, "files": dict(self.files)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A sandbox to boot. A limit of None means the provider's default. `ttl_s` is the length of the lease; when it
    expires without renewal, the sandbox is killed."""

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
    guest: Guest | None = None


def refuse_extras(spec: SandboxSpec, provider: str) -> None:
    """Refuse a spec with folders or a guest, for providers without Feature.FOLDERS and GUEST. Raises Unsupported."""
    if spec.guest is not None:
        raise Unsupported(f"guest ({spec.guest.user}): the {provider} provider cannot add an account to a sandbox")
    if spec.folders:
        targets = ", ".join(folder.target for folder in spec.folders)
        raise Unsupported(
            f"folders ({targets}): the {provider} provider cannot mount host folders; put them in the image"
        )


AVOID_LABEL: Final = "headrace-avoid"
"""A label that lists endpoints, separated by spaces, that a multi-host provider should avoid for the sandbox."""
_HOSTS_AT_ENDPOINTS: Final = frozenset({"remote", "simulated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRef:
    """Address and credentials of one sandbox: `endpoint` is a socket path or URL, and `secret` gives access to this
    sandbox only."""

    provider: str
    id: SandboxId
    endpoint: str
    secret: str = field(repr=False)

    @property
    def host(self) -> str:
        """The host to name in failure reports: the endpoint if it names a host, otherwise the provider."""
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
    """A finished command. `stdout` and `stderr` hold the first `max_output_bytes` of each stream; `truncated` is set if
    there was more."""

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
    """Both streams, interleaved as a terminal shows them."""


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
    """A TCP service on the host."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxUsage:
    """Current resource usage of a sandbox; `cpu_s` is the CPU time used since its boot. A limit of None means no
    limit."""

    cpu_s: float
    memory_bytes: int
    memory_limit_bytes: int | None
    disk_bytes: int
    disk_limit_bytes: int | None
    processes: int
    cpus: float | None
    oom_kills: int
    """Number of processes killed because `memory_limit_bytes` was reached."""
    limit_kills: int = 0
    """Times that all its commands were killed because it held more than its even share of the host's processes or open
    files, and the host ran out of them."""
    memory_peak_bytes: int | None = None
    """Most memory used since the boot; None if the kernel does not record it."""
    cpu_waited_s: float | None = None
    """Seconds since the boot for which it had work and got no CPU: throttled by its limit, or behind other work of the
    host (`cpu.stat` and `cpu.pressure`). None if nothing counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with its user, its additional environment and its working folder."""

    command: str | Sequence[str]
    """A string for `bash -c`, or a program and its arguments."""
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    """None means the image's working folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecCommand(Command):
    """The arguments of `Sandbox.exec`, as passed to providers."""

    command: str
    stdin: bytes | None = None
    timeout_s: float
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES
    """Limit of each of the two output streams."""
    exec_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnCommand(Command):
    """The arguments of `Sandbox.spawn`, as passed to providers."""

    stdin: bool = False
    terminal: TerminalSize | None = None
    timeout_s: float | None = None


class Process(Protocol):
    """A command running in the background. It ends when its sandbox ends, at its timeout, or on its own. If its output
    is not read, it blocks once its pipe is full."""

    @property
    def pid(self) -> int:
        """The pid of the command inside the sandbox."""

    def output(self) -> AsyncIterator[Output]:
        """Yield the output. It can be read only once, by one reader. Ends when both streams end, or 0.2 s after the
        command if a daemon still has them open. A slow reader slows the command down, because only its pipe buffers
        output."""

    async def write_stdin(self, data: bytes) -> None:
        """Write to standard input; blocks while the command is not reading. Raises SandboxFileError if standard input
        is closed."""

    async def close_stdin(self) -> None:
        """Close standard input. Idempotent. In a terminal this sends Ctrl-D."""

    async def signal(self, number: int) -> None:
        """Send a signal to the command; SIGKILL is sent to its whole process tree. Does nothing once the command has
        ended."""

    async def resize(self, size: TerminalSize) -> None:
        """Change the size of the terminal. Raises SpecRefused if the command has no terminal."""

    async def wait(self) -> int:
        """Wait for the exit code, which is 128 + n after signal n. May be called repeatedly. Raises ExecTimeout,
        SandboxGone."""


class Sandbox(ABC):
    """A running sandbox. Every method raises SandboxGone once the sandbox is dead, and optional methods raise
    Unsupported unless a provider overrides them."""

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
        """Run `bash -c command` in a fresh process, in the image's working folder (`/workspace` for the image `host`)
        unless `cwd` names another.

        A command that is killed by signal n has exit code 128 + n; an unknown user or folder gives exit code 126 and a
        line on stderr. A second call with the same `exec_id`, from any holder of the ref, runs nothing: it waits for
        the result of the first call and returns it. Raises ExecTimeout (the process tree is dead), SandboxGone,
        ExecResultLost, Unsupported.
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
        """Run a command and wait for it to end; the provider's part of `exec`."""

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
        """Start a command and return at once. A string is run with `bash -c`; a sequence is a program and its
        arguments.

        Without `stdin`, its standard input is empty. With a terminal, all three streams are connected to the terminal.
        Without `timeout_s`, it runs until its sandbox ends. Raises SandboxGone, Unsupported.
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
        self._refuse("run a command in the background")

    @abstractmethod
    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        """Return the content of a regular file. Raises SandboxFileError (missing, not regular, larger than
        `max_bytes`)."""

    @abstractmethod
    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        """Create or replace a file, and create its missing parent folders. The content is bytes, or a file on the host,
        which is not loaded into memory. Raises SandboxFileError."""

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        """Write several files as `write` does, in one round trip if the provider supports it. On an error, the files
        before the failed one have been written."""
        for path, data in files.items():
            await self.write(path, data, user=user)

    async def freeze(self) -> None:
        """Kill every process but retain the file layer, which FrozenMount can mount in a clean sandbox. Idempotent."""
        self._refuse("freeze")

    async def pause(self) -> None:
        """Suspend every process: none uses processor time, and commands wait. The lease keeps running. Idempotent."""
        self._refuse("pause")

    async def resume(self) -> None:
        """Continue a paused sandbox. Idempotent."""
        self._refuse("resume")

    async def snapshot(self) -> ImageRef:
        """Make an image of the current file layer and end the sandbox. Clones share the layer without copying it."""
        self._refuse("snapshot")

    def expose(self, port: int, target: HostPort, prefix: str) -> AbstractAsyncContextManager[None]:
        """Make a service on the host available at 127.0.0.1:`port` inside the sandbox while the context is open. Only
        HTTP requests for URL paths below `prefix` are forwarded; all others get 403. Raises SpecRefused (the port is in
        use)."""
        self._refuse(f"expose port {port} for {target.host}:{target.port}{prefix}")

    async def tcp_socket(self, *, ipv6: bool = False) -> socket.socket:
        """Return a TCP socket in the sandbox's network, not connected yet. Its holder connects it to a port on which a
        program inside listens (127.0.0.1 or ::1), and closes it."""
        self._refuse("connect to a port")

    async def usage(self) -> SandboxUsage:
        """Return the current resource usage."""
        self._refuse("report resource usage")

    @abstractmethod
    async def renew(self, ttl_s: float) -> None:
        """Make the lease end `ttl_s` seconds from now. Raises SandboxGone; a frozen sandbox has a lease too."""

    @abstractmethod
    async def kill(self) -> None:
        """End the whole process tree and drop the file layer. Idempotent."""

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} cannot {what}: use a provider that can (guide 'Sandboxes')")


@runtime_checkable
class ProgramRunner(Protocol):
    """A sandbox that runs headrace's Python programs without an interpreter in its image."""

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
        """Run Python source as `python -I -S -c program arguments...` would, in `/`, in a process in which headrace's
        interpreter is already running. The program may import the modules in `launcher.commands.PRELOADED`, but nothing
        from the image. Raises ExecTimeout, SandboxGone."""


class SandboxProvider(Protocol):
    """Provider of sandboxes. `create` with a known idempotency key returns the existing sandbox."""

    @property
    def features(self) -> frozenset[Feature]: ...

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox. Raises SandboxError; Unsupported if the spec needs a feature that the provider lacks."""

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def list(self) -> list[SandboxInfo]: ...

    async def destroy(self, sandbox: SandboxId) -> None:
        """Kill a sandbox by id, for one that `list` shows but whose ref is unknown. Idempotent."""

    async def aclose(self) -> None: ...
