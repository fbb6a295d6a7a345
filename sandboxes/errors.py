"""Errors of sandboxes. Each states whether a retry may help (`transient`) and can be pickled.

```
SandboxError
├── TransientSandboxError            a retry, elsewhere or later, may succeed
│   ├── BootTimeout                  the sandbox was not ready in time
│   ├── BootFailed                   the host refused a step of the boot (out of processes, memory, descriptors)
│   ├── CapacityExceeded             no capacity now; retry after `retry_after_s`
│   │   ├── RateLimited              the provider sheds load (429)
│   │   ├── QueueTimeout             no capacity within the caller's time limit
│   │   ├── ImagePending             the image is still being unpacked
│   │   └── OutOfDisk                less free space on the host than the watermark
│   ├── ProviderUnreachable          no answer, or 502/503/504: the effect is unknown until a retry with the same key
│   └── LauncherGone                 the process that owns the sandboxes died, and the sandboxes with it
└── PermanentSandboxError            the same call would fail again
    ├── ImageUnknown
    ├── ImageRefused                 the image exists but is unusable: damaged, unsafe, or without bash
    ├── SpecRefused                  the spec requests something that this provider cannot do
    │   └── Unsupported              the provider lacks this feature
    ├── SecretRefused
    ├── SandboxGone                  killed, expired or frozen
    ├── ExecTimeout                  the command's process tree is dead
    ├── ExecResultLost               a command with this exec_id has run, but its output was lost with its caller
    ├── SandboxFileError             missing, not a regular file, too large, no permission
    │   └── FrozenPathRefused        the declared data path is missing or leads through a symbolic link
    ├── FolderRefused                a private folder or TMPDIR cannot be used: unwritable, or another user's
    ├── SandboxLedgerRefused         another process has the pool's ledger open, or the ledger has another version
    └── NamespacesUnavailable        this machine cannot isolate sandboxes, for the given `reason`
```
"""

from __future__ import annotations

from typing import ClassVar, Final

from headrace.buffer.primitives.critical_path import Segment


class SandboxError(Exception):
    """Root of the tree. `message` is one line that names the setting to change; `host` is the host that failed, or
    empty. `segments` and `at_s` are those of a lease that failed, as in `Lease`."""

    transient: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.host = ""
        self.segments: tuple[Segment, ...] = ()
        self.at_s: float | None = None

    def __str__(self) -> str:
        return self.message


class TransientSandboxError(SandboxError):
    transient = True


class BootTimeout(TransientSandboxError):
    pass


class BootFailed(TransientSandboxError):
    pass


class CapacityExceeded(TransientSandboxError):
    """No capacity for another sandbox; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s


class RateLimited(CapacityExceeded):
    pass


class QueueTimeout(CapacityExceeded):
    pass


class OutOfDisk(CapacityExceeded):
    pass


class ImagePending(CapacityExceeded):
    pass


class ProviderUnreachable(TransientSandboxError):
    pass


class LauncherGone(TransientSandboxError):
    pass


class PermanentSandboxError(SandboxError):
    pass


class ImageUnknown(PermanentSandboxError):
    pass


class ImageRefused(PermanentSandboxError):
    pass


class SpecRefused(PermanentSandboxError):
    pass


class Unsupported(SpecRefused):
    pass


class SecretRefused(PermanentSandboxError):
    pass


class SandboxGone(PermanentSandboxError):
    pass


class ExecTimeout(PermanentSandboxError):
    pass


class ExecResultLost(PermanentSandboxError):
    pass


class SandboxFileError(PermanentSandboxError):
    pass


class FrozenPathRefused(SandboxFileError):
    pass


class FolderRefused(PermanentSandboxError):
    pass


class SandboxLedgerRefused(PermanentSandboxError):
    pass


WITHOUT_NAMESPACES: Final = "set sandbox.provider to remote or e2b"
"""What replaces local sandboxes on a machine without namespaces."""


class NamespacesUnavailable(PermanentSandboxError):
    """This machine cannot isolate sandboxes; `reason` names the missing guarantee and the kernel's error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"namespace sandboxes are not available on this machine: {self.reason}; {WITHOUT_NAMESPACES}"


_BY_NAME: dict[str, type[SandboxError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, SandboxError)
}


def error_from_name(name: str, message: str) -> SandboxError:
    """Return the typed error for a name received over the wire; an unknown name gives a SandboxError."""
    return _BY_NAME.get(name, SandboxError)(message)
