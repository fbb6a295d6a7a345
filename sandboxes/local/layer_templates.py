"""Empty file systems for layers on disk: one for each size, copied by every boot."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import BootFailed, OutOfDisk
from headrace.sandboxes.kernel.disk_layers import template_name

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S: Final = 60.0
# No journal: what a crash leaves half-written is thrown away with the sandbox.
_OPTIONS: Final = ("-b", "4096", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=1,nodiscard")


def make_template(folder: Path, size_bytes: int) -> None:
    """Make the template of a size unless it is there. Raises BootFailed, OutOfDisk."""
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
