"""Programs of this host that make images, such as tar and pip.

Invariants:
- A program gets no secret of the environment, dies with this process, and is ended when its caller is cancelled.
- What it prints is not shown; the end of its standard error is kept.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from headrace.sandboxes.host.child_environment import child_environment
from headrace.sandboxes.linux import syscalls

_ERROR_BYTES: Final = 2000


async def run_host_program(command: Sequence[str], *, max_file_bytes: int | None = None) -> tuple[int, str]:
    """Run a program to its end, and return its status (negative: the signal) and the last 2000 bytes of its standard
    error. It can write no file larger than `max_file_bytes`. Raises OSError if it does not start."""

    def limit() -> None:
        syscalls.die_with_parent(signal.SIGKILL)
        if max_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
        preexec_fn=limit,
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    assert process.returncode is not None
    return process.returncode, errors[-_ERROR_BYTES:].decode(errors="replace").strip()
