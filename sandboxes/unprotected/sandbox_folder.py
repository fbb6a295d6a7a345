"""Folder of one subprocess sandbox, whose state is in small files that all attached processes share.

Invariants: a sandbox exists as long as its folder does; a file is replaced as a whole, so that no reader sees a partial
one.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from pathlib import Path
from typing import Final

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import SandboxGone, SpecRefused
from headrace.sandboxes.unprotected.mapped_paths import copy_frozen
from headrace.sandboxes.unprotected.marked_processes import kill_marked

MARK: Final = "HEADRACE_SANDBOX_FOLDER"
"""Environment variable set in every process of a sandbox."""
MAPPED: Final = ("workspace", "home", "tmp", "root")


class SandboxFolder:
    """State files of one sandbox, shared by all attached processes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.tree = home / "tree"

    @property
    def frozen(self) -> bool:
        return (self.home / "frozen").exists()

    def secret(self) -> str:
        return self._read("secret")

    def deadline(self) -> float:
        """Return the end of the lease on the monotonic clock, which all processes on a host share. Raises
        SandboxGone."""
        return float(self._read("deadline"))

    def set_deadline(self, deadline: float) -> None:
        # Written to another file and renamed, so that a reader never sees half a number.
        beside = self.home / f"deadline-{secrets.token_hex(4)}"
        try:
            beside.write_text(repr(deadline))
            beside.rename(self.home / "deadline")
        except FileNotFoundError as error:
            raise self._gone() from error

    def label(self) -> str:
        return self._read("label")

    def mapped(self) -> tuple[str, ...]:
        return tuple(json.loads(self._read("mapped")))

    def _read(self, name: str) -> str:
        try:
            return (self.home / name).read_text()
        except FileNotFoundError as error:
            raise self._gone() from error

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self.home.name} is gone: killed, or its lease ended")

    def kill_processes(self) -> None:
        if (self.home / "used").exists():
            kill_marked(f"{MARK}={self.home}")

    def destroy(self) -> None:
        self.kill_processes()
        shutil.rmtree(self.home, ignore_errors=True)


def make_sandbox_folder(home: Path, secret: str, spec: SandboxSpec, label: str) -> None:
    tree = home / "tree"
    home.mkdir(mode=0o700)
    tree.mkdir()
    for name in MAPPED:
        (tree / name).mkdir()
    names = list(MAPPED)
    for mount in spec.mounts:
        source = SandboxFolder(home.parent / mount.source)
        if not source.frozen:
            raise SpecRefused(f"mount source {mount.source} is not a frozen sandbox")
        copy_frozen(source.tree, mount.path, tree, mount.target)
        names.append(mount.target.strip("/").split("/")[0])
    (home / "secret").write_text(secret)
    (home / "label").write_text(label)
    (home / "mapped").write_text(json.dumps(sorted(set(names))))
    SandboxFolder(home).set_deadline(time.monotonic() + spec.ttl_s)
