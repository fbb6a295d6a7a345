"""The contract of a sandbox provider.

Invariants every provider keeps:
- A ref is frozen and picklable; whoever holds it attaches and talks to the sandbox directly, without Ray.
- `kill` is idempotent and takes the whole process tree.
- A command never outlives its timeout; a timeout is a typed error, never a result.
- Everything a sandbox prints or leaves is data: size-capped, never resolved as a path of the host.
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
"""What `SandboxSpec.image` takes: `host`, a path of a root file system, an archive, `debootstrap:SUITE`, a snapshot."""

DEFAULT_MAX_OUTPUT_BYTES = 1 << 20


class Network(StrEnum):
    """What the sandbox can reach."""

    NONE = "none"
    """Loopback of its own only."""
    HOST = "host"
    """The host's network; only with the subprocess provider, which protects nothing."""


class Feature(StrEnum):
    """What not every provider has; a call that needs a missing one raises Unsupported."""

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
    """A data path of a frozen (dead) sandbox, shown read-only, nosuid, nodev and noexec in a new one."""

    source: SandboxId
    path: str
    """Absolute path in the frozen sandbox; resolved without following symbolic links."""
    target: str
    """Absolute path in the new sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFolder:
    """A folder of the provider's host, shown in a sandbox of any image: read-only, nosuid and nodev, its programs can
    be run. All sandboxes share its files; nothing is copied. A snapshot does not hold it."""

    source: str
    """Absolute path on the host, on a file system whose files can be shown with other ids (ext4, xfs, btrfs, tmpfs)."""
    target: str
    """Absolute path in the sandbox, outside of its system's folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to boot. A limit of None is the provider's own. `ttl_s` is the lease: what nobody renews is killed."""

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
"""A label of specs: endpoints, with blanks between, on which a provider of several hosts should not boot it."""
_HOSTS_AT_ENDPOINTS: Final = frozenset({"remote", "simulated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRef:
    """A right to talk to one sandbox: `endpoint` is where (a socket path or URL), `secret` opens this one only."""

    provider: str
    id: SandboxId
    endpoint: str
    secret: str = field(repr=False)

    @property
    def host(self) -> str:
        """Where it runs, for accounts of failures: the endpoint where that names a host, else the provider."""
        return self.endpoint if self.provider in _HOSTS_AT_ENDPOINTS else self.provider


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One row of `list`. `expires_in_s` is the rest of its lease."""

    id: SandboxId
    state: str
    expires_in_s: float
    labels: Mapping[str, str]
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A finished command. `stdout`/`stderr` are the first `max_output_bytes` of each; `truncated`: there was more."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    duration_s: float


class Stream(StrEnum):
    """Where a piece of output came from."""

    STDOUT = "stdout"
    STDERR = "stderr"
    TERMINAL = "terminal"
    """Both, in the order in which a terminal shows them."""


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
    """What a sandbox takes now; `cpu_s` since its boot. A limit of None is no limit of its own."""

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
    """A command that was started and is not waited for. It ends with its sandbox, at its timeout, or by itself;
    whoever forgets it leaves it running with nobody reading: it waits once its pipe is full."""

    @property
    def pid(self) -> int:
        """Its number inside the sandbox."""
        ...

    def output(self) -> AsyncIterator[Output]:
        """What it prints, once, for one reader. Ends when both streams have, or 0.2 s after the command itself where a
        daemon holds them. A reader that is slow slows the command down: nothing is buffered beyond its pipe."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Waits while the command does not read. Raises SandboxFileError when its standard input is closed."""
        ...

    async def close_stdin(self) -> None:
        """Idempotent. For a terminal this types Ctrl-D."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to the command itself; SIGKILL takes its whole tree. Nothing happens once it has ended."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Raises SpecRefused without a terminal."""
        ...

    async def wait(self) -> int:
        """Its exit code, 128 + n after signal n; may be asked again. Raises ExecTimeout, SandboxGone."""
        ...


class Sandbox(Protocol):
    """A running sandbox. Every method raises SandboxGone once it is dead."""

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
        """Run `bash -c command` in a fresh process, in the image's working folder (`/workspace` of `host`) unless `cwd`
        says otherwise.

        A signal n ends it with exit code 128 + n; an unknown user or folder with 126 and a line on stderr.
        The same `exec_id` again, from whoever holds the ref, runs nothing: it waits for, or returns, the first result.
        Raises ExecTimeout (the tree is dead), SandboxGone, ExecResultLost, Unsupported.
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
        """Start a command and return at once: a text as `bash -c` takes it, or a program and its arguments.

        Without `stdin` its standard input is empty. With a terminal all three streams are that terminal's. Without
        `timeout_s` it ends with its sandbox. Raises SandboxGone, Unsupported.
        """
        ...

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        """Content of a regular file inside. Raises SandboxFileError (missing, not regular, larger than `max_bytes`)."""
        ...

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        """Create or replace a file inside, making parent directories, from bytes or a file of the host, which is not
        held in memory. Raises SandboxFileError."""
        ...

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        """`write` for several files in one round trip; on an error those before it are written."""
        ...

    async def freeze(self) -> None:
        """Kill every process but keep the file layer, which FrozenMount can show to a clean sandbox. Idempotent."""
        ...

    async def pause(self) -> None:
        """Stop every process where it is; they take no processor time, commands wait. Its lease goes on. Idempotent.
        Raises Unsupported."""
        ...

    async def resume(self) -> None:
        """Let a paused sandbox go on. Idempotent."""
        ...

    async def snapshot(self) -> ImageRef:
        """Make an image of the file layer as it is now and end the sandbox: clones share the layer without a copy.
        Raises Unsupported."""
        ...

    def expose(self, port: int, target: HostPort, prefix: str) -> AbstractAsyncContextManager[None]:
        """A service of the host on the sandbox's own 127.0.0.1:`port` while the context lasts: only HTTP requests for
        URL paths below `prefix` pass, all others get 403. Raises Unsupported, SpecRefused (the port is taken)."""
        ...

    async def usage(self) -> SandboxUsage:
        """Raises Unsupported."""
        ...

    async def renew(self, ttl_s: float) -> None:
        """Let the lease end `ttl_s` seconds from now. Raises SandboxGone; a frozen sandbox has a lease too."""
        ...

    async def kill(self) -> None:
        """End the whole tree and drop the layer. Idempotent."""
        ...


@runtime_checkable
class ProgramRunner(Protocol):
    """A sandbox that runs programs of ours without an interpreter of its image."""

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
    """Boots sandboxes. `create` with an idempotency key that is known returns the sandbox it made before."""

    @property
    def features(self) -> frozenset[Feature]: ...

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Raises SandboxError; Unsupported where the spec needs a feature that the provider lacks."""
        ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def list(self) -> list[SandboxInfo]: ...

    async def destroy(self, sandbox: SandboxId) -> None:
        """Kill by id alone, with the account's own right: what `list` shows and nobody holds a ref of. Idempotent."""
        ...

    async def aclose(self) -> None: ...
