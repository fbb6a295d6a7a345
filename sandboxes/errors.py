"""What can go wrong with a sandbox. Each error says whether trying again may help (`transient`) and survives pickling.

```
SandboxError
├── TransientSandboxError            try again, elsewhere or later
│   ├── BootTimeout                  the sandbox was not ready in time
│   ├── BootFailed                   the host refused a step of the boot (out of processes, memory, descriptors)
│   ├── CapacityExceeded             no room now; `retry_after_s` says when to ask again
│   │   ├── RateLimited              the provider sheds load (429)
│   │   ├── QueueTimeout             no place within the time the caller gave
│   │   ├── ImagePending             the image is being unpacked; that goes on
│   │   └── OutOfDisk                less free space on the host than the watermark
│   ├── ProviderUnreachable          no answer, or 502/503/504: what it did is unknown until the same key is asked again
│   └── LauncherGone                 the process that owns the sandboxes died, and they with it
└── PermanentSandboxError            the same call would fail again
    ├── ImageUnknown
    ├── ImageRefused                 the image is there but unusable: damaged, unsafe, or without bash
    ├── SpecRefused                  the spec asks for what this provider does not have
    │   └── Unsupported              the provider lacks this feature
    ├── SecretRefused
    ├── SandboxGone                  killed, expired or frozen
    ├── ExecTimeout                  the command's process tree is dead
    ├── ExecResultLost               a command with this exec_id has run; whoever ran it died with its output
    ├── SandboxFileError             missing, not a regular file, too large, no permission
    │   └── FrozenPathRefused        the declared data path is missing or leads through a symbolic link
    ├── FolderRefused                a private folder or TMPDIR cannot be used: unwritable, or another user's
    ├── LedgerRefused                another process has the pool's ledger, or it is none of this version
    └── NamespacesUnavailable        this machine cannot isolate; `reason` says why
```
"""

from __future__ import annotations

from typing import ClassVar


class SandboxError(Exception):
    """Root of the tree. `message` is one line that names the knob to turn, `host` the one where it happened, as far as
    that is known."""

    transient: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.host = ""

    def __str__(self) -> str:
        return self.message


class TransientSandboxError(SandboxError):
    transient = True


class BootTimeout(TransientSandboxError):
    pass


class BootFailed(TransientSandboxError):
    pass


class CapacityExceeded(TransientSandboxError):
    """No room for another sandbox; ask again after `retry_after_s` seconds."""

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


class LedgerRefused(PermanentSandboxError):
    pass


class NamespacesUnavailable(PermanentSandboxError):
    """`reason` names the missing guarantee and the error of the kernel."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"no namespace sandboxes on this machine: {self.reason}; `--sandbox subprocess` runs without protection"


_BY_NAME: dict[str, type[SandboxError]] = {
    kind.__name__: kind
    for kind in (
        BootTimeout,
        BootFailed,
        CapacityExceeded,
        RateLimited,
        QueueTimeout,
        OutOfDisk,
        ImagePending,
        ProviderUnreachable,
        LauncherGone,
        ImageUnknown,
        ImageRefused,
        SpecRefused,
        Unsupported,
        SecretRefused,
        SandboxGone,
        ExecTimeout,
        ExecResultLost,
        SandboxFileError,
        FrozenPathRefused,
    )
}


def error_from_name(name: str, message: str) -> SandboxError:
    """The typed error for a name that crossed the wire; an unknown name is a SandboxError."""
    return _BY_NAME.get(name, SandboxError)(message)
