"""Build steps, recipes and results of the image builder.

Invariant: values only; nothing here reads files or boots sandboxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from headrace.sandboxes.errors import PermanentSandboxError

E2B_USER: Final = "user"
MAX_STEPS: Final = 100
"""Each RUN and COPY is a layer, of which an image may have 128 (`rootfs.MAX_LAYERS`)."""


class StepKind(StrEnum):
    """Kinds of build steps, with their arguments."""

    RUN = "RUN"
    """command[, user]"""
    COPY = "COPY"
    """source, target[, owner[, octal mode]]"""
    ENV = "ENV"
    """name, value, name, value, ..."""
    WORKDIR = "WORKDIR"
    """path"""
    USER = "USER"
    """name or number"""


_COUNTS: Final = {
    StepKind.RUN: (1, 2),
    StepKind.COPY: (2, 4),
    StepKind.ENV: (2, 1000),
    StepKind.WORKDIR: (1, 1),
    StepKind.USER: (1, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """One build step. `context` is the digest of the layer that holds the files of a COPY (build_context)."""

    kind: StepKind
    arguments: tuple[str, ...]
    context: str = ""
    force: bool = False
    """Run it even if its layer is cached."""

    def check(self) -> None:
        """Check the number and the form of the arguments. Raises ValueError."""
        count = len(self.arguments)
        least, most = _COUNTS[self.kind]
        if not least <= count <= most or (self.kind is StepKind.ENV and count % 2) or not self.arguments[0].strip():
            raise ValueError(f"has {count} arguments, or an empty one")
        if any("\0" in argument for argument in self.arguments):
            raise ValueError("an argument contains a NUL byte")
        if self.kind is StepKind.ENV:
            for name in self.arguments[::2]:
                if not name or "=" in name:
                    raise ValueError(f"{name[:100]!r} is not the name of a variable")


class BuildRefused(PermanentSandboxError):
    """A build that cannot succeed as it is: an instruction that fails or is not supported. `step` is its number from 1,
    `base` or `finalize`."""

    def __init__(self, message: str, step: str = "") -> None:
        super().__init__(message)
        self.step = step

    def __reduce__(self) -> tuple[type[BuildRefused], tuple[str, str]]:
        return type(self), (self.message, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """Limits of a build: seconds in total, bytes and entries per layer, seconds until the ready command succeeds."""

    total_s: float = 3600.0
    layer_bytes: int = 1 << 30
    entries: int = 200_000
    ready_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An image to build. `base` is an image reference or `host`."""

    base: str
    source: str = ""
    """What the client calls the base, for its log: references are the operator's."""
    steps: tuple[BuildStep, ...] = ()
    default_user: str = ""
    """User of the steps before the first USER; "" for the base's. `user` is made where it is missing."""
    start_command: str = ""
    ready_command: str = ""
    force: bool = False
    max_bytes: int | None = None
    """Bytes that the layers may have; None for no limit."""
