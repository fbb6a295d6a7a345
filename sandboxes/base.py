"""Contract of a sandbox provider.

Invariants of every provider:
- A ref is frozen and picklable; its holder attaches and talks to the sandbox directly, without Ray.
- `kill` is idempotent and kills the whole process tree.
- A command never outlives its timeout; a timeout is a typed error, never a result.
- All output and files of a sandbox are data: limited in size, and never resolved as a path of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NewType, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

SandboxId = NewType("SandboxId", str)
ImageRef = NewType("ImageRef", str)
"""Value of `SandboxSpec.image`: `host`, the path of a root file system or archive, `debootstrap:SUITE`, a snapshot."""

DEFAULT_MAX_OUTPUT_BYTES = 1 << 20


class Network(StrEnum):
    """Network access of a sandbox."""

    NONE = "none"
    """Only a loopback of its own."""
    HOST = "host"
    """The host's network; only with the subprocess provider, which has no isolation."""


class Feature(StrEnum):
    """Optional features of providers; a call that needs a missing one raises Unsupported."""

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
    """Data path of a frozen (dead) sandbox, shown read-only, nosuid, nodev and noexec in a new one."""

    source: SandboxId
    path: str
    """Absolute path in the frozen sandbox; resolved without following symbolic links."""
    target: str
    """Absolute path in the new sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFolder:
    """Folder of the provider's host, shown in a sandbox of any image: read-only, nosuid and nodev, its programs can be
    run. All sandboxes share its files; nothing is copied. A snapshot does not contain it."""

    source: str
    """Absolute path on the host, on a file system that supports idmapped mounts (ext4, xfs, btrfs, tmpfs)."""
    target: str
    """Absolute path in the sandbox, outside its system folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Settings of a new sandbox. A limit of None is the provider's default; `ttl_s` is the length of the lease."""

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


AVOID_LABEL: Final = "headrace-avoid"
"""Label of specs: endpoints, separated by blanks, on which a provider of several hosts should not boot the sandbox."""
_HOSTS_AT_ENDPOINTS: Final = frozenset({"remote", "simulated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRef:
    """Access to one sandbox: `endpoint` is its socket path or URL, `secret` is valid for this sandbox only."""

    provider: str
    id: SandboxId
    endpoint: str
    secret: str = field(repr=False)

    @property
    def host(self) -> str:
        """Name of its host for failure reports: the endpoint if that names a host, otherwise the provider."""
        return self.endpoint if self.provider in _HOSTS_AT_ENDPOINTS else self.provider


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """Row of `list`. `expires_in_s` is the rest of its lease."""

    id: SandboxId
    state: str
    expires_in_s: float
    labels: Mapping[str, str]
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a finished command. `stdout` and `stderr` are the first `max_output_bytes` of each; `truncated` is True
    if there was more."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    duration_s: float


class Stream(StrEnum):
    """Source of a chunk of output."""

    STDOUT = "stdout"
    STDERR = "stderr"
    TERMINAL = "terminal"
    """Both, in the order in which a terminal shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Chunk of output, at most 64 KiB."""

    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize:
    """Size of a terminal in characters."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPort:
    """TCP service of the host."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxUsage:
    """Current usage of a sandbox; `cpu_s` is counted since its boot. None for a limit means that there is none."""

    cpu_s: float
    memory_bytes: int
    memory_limit_bytes: int | None
    disk_bytes: int
    disk_limit_bytes: int | None
    processes: int
    cpus: float | None
    oom_kills: int
    """Processes killed because `memory_limit_bytes` was reached."""


class Process(Protocol):
    """Command that was started without waiting for its end. It ends with its sandbox, at its timeout, or by itself. If
    its caller drops it, it keeps running without a reader and blocks once its pipe is full."""

    @property
    def pid(self) -> int:
        """Process id inside the sandbox."""
        ...

    def output(self) -> AsyncIterator[Output]:
        """Iterate over the output, once and for one reader. Ends when both streams have ended, or 0.2 s after the
        command itself if a daemon holds them open. A slow reader slows the command down: nothing is buffered beyond its
        pipe."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Write to standard input; waits while the command does not read. Raises SandboxFileError if it is closed."""
        ...

    async def close_stdin(self) -> None:
        """Close standard input; for a terminal this types Ctrl-D. Idempotent."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to the command; SIGKILL kills its whole tree. Does nothing once the command has ended."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Change the size of the terminal. Raises SpecRefused without a terminal."""
        ...

    async def wait(self) -> int:
        """Return the exit code, 128 + n after signal n; can be called again. Raises ExecTimeout, SandboxGone."""
        ...


class Sandbox(Protocol):
    """Running sandbox. Every method raises SandboxGone once it is dead."""

    @property
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
        """Run `bash -c command` in a new process.

        Its working folder is `cwd`, or by default the image's (`/workspace` of `host`). After signal n its exit code is
        128 + n; for an unknown user or folder it is 126, with a line on stderr. A repeated `exec_id`, from any holder
        of the ref, runs nothing: it waits for the first result and returns it. Raises ExecTimeout (the tree is dead),
        SandboxGone, ExecResultLost, Unsupported.
        """
        ...

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
        """Start a command and return at once: a string is run by `bash -c`, a list is a program and its arguments.
        Without `stdin` its standard input is empty. With a terminal all three streams are that terminal's. Without
        `timeout_s` it ends with its sandbox. Raises SandboxGone, Unsupported."""
        ...

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        """Return the content of a regular file. Raises SandboxFileError (missing, not regular, above `max_bytes`)."""
        ...

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        """Create or replace a file inside and make its parent folders. The content is given as bytes, or as a file of
        the host, which is not read into memory. Raises SandboxFileError."""
        ...

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        """Write several files in one round trip; after an error the files before it are written."""
        ...

    async def freeze(self) -> None:
        """Kill every process but retain the file layer, which FrozenMount can show to a clean sandbox. Idempotent."""
        ...

    async def pause(self) -> None:
        """Stop every process; commands wait, but the lease still runs. Idempotent. Raises Unsupported."""
        ...

    async def resume(self) -> None:
        """Let the processes of a paused sandbox continue. Idempotent."""
        ...

    async def snapshot(self) -> ImageRef:
        """Turn the file layer into an image, which clones share without a copy, and end the sandbox. Raises
        Unsupported."""
        ...

    def expose(self, port: int, target: HostPort, prefix: str) -> AbstractAsyncContextManager[None]:
        """Make a service of the host available on the sandbox's own 127.0.0.1:`port` while the context lasts. Only HTTP
        requests for URL paths below `prefix` pass; all others get 403. Raises Unsupported, SpecRefused (the port is
        taken)."""
        ...

    async def usage(self) -> SandboxUsage:
        """Return the current usage. Raises Unsupported."""
        ...

    async def renew(self, ttl_s: float) -> None:
        """Let the lease end `ttl_s` seconds from now; a frozen sandbox has a lease too. Raises SandboxGone."""
        ...

    async def kill(self) -> None:
        """Kill the whole tree and drop the layer. Idempotent."""
        ...


@runtime_checkable
class ProgramRunner(Protocol):
    """Sandbox that runs Python programs without an interpreter in its image."""

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
        """Run a Python program like `python -I -S -c program arguments...` in `/`, in a process that already has
        headrace's interpreter. It may import the modules of `launcher.commands.PRELOADED`, and nothing of the image.
        Raises ExecTimeout, SandboxGone."""
        ...


class SandboxProvider(Protocol):
    """Provider that boots sandboxes. `create` with a known idempotency key returns the sandbox that it made before."""

    @property
    def features(self) -> frozenset[Feature]: ...

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox. Raises SandboxError; Unsupported if the spec needs a feature that the provider lacks."""
        ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def list(self) -> list[SandboxInfo]: ...

    async def destroy(self, sandbox: SandboxId) -> None:
        """Kill a sandbox by its id alone, with the provider's own credentials. Idempotent."""
        ...

    async def aclose(self) -> None: ...
