"""Empty file systems for file layers on disk: one for each size, copied at every boot."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import BootFailed, OutOfDisk, SpecRefused
from headrace.sandboxes.kernel.disk_layers import template_name

if TYPE_CHECKING:
    from pathlib import Path

_LEAST_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 60.0
# No journal: after a crash the file system is dropped with its sandbox.
_OPTIONS: Final = ("-b", "4096", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=1,nodiscard")


class LayerTemplates:
    """Templates in one folder of the host's disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = asyncio.Lock()

    async def provide(self, size_bytes: int) -> int:
        """Make the template for a layer of this size, and return the size rounded up to that of the template. Raises
        SpecRefused, BootFailed, OutOfDisk."""
        size_bytes = max(size_bytes, _LEAST_BYTES)
        status = await asyncio.to_thread(os.statvfs, self._folder)
        if size_bytes > (most := status.f_blocks * status.f_frsize):
            text = f"disk_bytes={size_bytes} is above the ceiling {most}, the size of {self._folder}; request less"
            raise SpecRefused(text)
        size_bytes = -(-size_bytes // (1 << 20)) << 20
        async with self._making:
            await asyncio.to_thread(make_template, self._folder, size_bytes)
        return size_bytes


def make_template(folder: Path, size_bytes: int) -> None:
    """Make the template of a size unless it exists. Raises BootFailed, OutOfDisk."""
    path = folder / template_name(size_bytes)
    if path.exists():
        return
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.truncate(size_bytes)
        environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
        command = ("mkfs.ext4", "-q", "-F", *_OPTIONS, draft)
        subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S, env=environment)
        draft.rename(path)
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip()
        raise (OutOfDisk if "No space" in text else BootFailed)(f"mkfs.ext4: {text}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BootFailed(f"layers on disk need mkfs.ext4 (package e2fsprogs) and a writable folder: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
