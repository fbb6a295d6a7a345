"""The contract of a sandbox provider (DESIGN 5).

Invariants every provider keeps:
- A ref is frozen and picklable; whoever holds it attaches and talks to the sandbox directly, without Ray.
- `kill` is idempotent and takes the whole process tree.
- A command never outlives its timeout; a timeout is a typed error, never a result.
- Everything a sandbox prints or leaves is data: size-capped, never resolved as a path of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

SandboxId = NewType("SandboxId", str)

DEFAULT_MAX_OUTPUT_BYTES = 1 << 20


class Network(StrEnum):
    """What the sandbox can reach."""

    NONE = "none"
    """Loopback of its own only."""
    HOST = "host"
    """The host's network; only with the subprocess provider, which protects nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMount:
    """A data path of a frozen (dead) sandbox, shown read-only, nosuid, nodev and noexec in a new one."""

    source: SandboxId
    path: str
    """Absolute path in the frozen sandbox; resolved without following symbolic links."""
    target: str
    """Absolute path in the new sandbox."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRef:
    """A right to talk to one sandbox: `endpoint` is where (a socket path or URL), `secret` opens this one only."""

    provider: str
    id: SandboxId
    endpoint: str
    secret: str = field(repr=False)


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
    ) -> ExecResult:
        """Run `bash -c command` in a fresh process, in `/workspace` unless `cwd` says otherwise.

        A signal n ends it with exit code 128 + n; an unknown user or folder with 126 and a line on stderr.
        Raises ExecTimeout (the tree is dead), SandboxGone.
        """
        ...

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        """Content of a regular file inside. Raises SandboxFileError (missing, not regular, larger than `max_bytes`)."""
        ...

    async def write(self, path: str, data: bytes, *, user: str = "root") -> None:
        """Create or replace a file inside, making parent directories. Raises SandboxFileError."""
        ...

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        """`write` for several files in one round trip; on an error those before it are written."""
        ...

    async def freeze(self) -> None:
        """Kill every process but keep the file layer, which FrozenMount can show to a clean sandbox. Idempotent."""
        ...

    async def renew(self, ttl_s: float) -> None:
        """Let the lease end `ttl_s` seconds from now. Raises SandboxGone; a frozen sandbox has a lease too."""
        ...

    async def kill(self) -> None:
        """End the whole tree and drop the layer. Idempotent."""
        ...


class SandboxProvider(Protocol):
    """Boots sandboxes. `create` with an idempotency key that is known returns the sandbox it made before."""

    async def create(self, spec: SandboxSpec) -> SandboxRef: ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def list(self) -> list[SandboxInfo]: ...

    async def aclose(self) -> None: ...
