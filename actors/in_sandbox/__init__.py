"""Programs that run inside clean sandboxes, sent as text: standard library only, Python 3.7 or later, no imports of
ours. With an older Python they end with TOO_OLD and a line that says so."""

from __future__ import annotations

import shlex
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.base import DEFAULT_MAX_OUTPUT_BYTES, ProgramRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.sandboxes.base import ExecResult, Sandbox

ISOLATED: Final = "-I -S"
"""Options of Python: no environment variables, no user site, no site customisation."""
TOO_OLD: Final = 67
_START: Final = f"""\
import sys
if sys.version_info < (3, 7):
    sys.stderr.write("needs Python 3.7 or later, and this is " + sys.version.split()[0] + "\\n")
    sys.exit({TOO_OLD})
exec(sys.argv.pop(1))
"""
"""Python of any version can read this, and says what is wrong; in our programs it would find errors of syntax, and end
with 1 as a failed check does."""


def program_command(python: str, name: str, *arguments: str, options: str = ISOLATED) -> str:
    """Shell text that runs one of the programs; `options` are Python's."""
    return f"{python} {options} {shlex.join(['-c', _START, source(name), *arguments])}"


@cache
def source(name: str) -> str:
    """Text of one of the programs of this folder."""
    return files(__name__).joinpath(f"{name}.py").read_text(encoding="utf-8")


async def run_program(
    room: Sandbox,
    name: str,
    arguments: Sequence[str] = (),
    *,
    python: str,
    stdin: bytes = b"",
    timeout_s: float,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> ExecResult:
    """Run one of the programs of this folder that need nothing of the image, as root: without a new interpreter where
    the sandbox can, else with the image's `python`. Raises ExecTimeout, SandboxError."""
    if isinstance(room, ProgramRunner):
        return await room.run_program(
            source(name), arguments, stdin=stdin, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )
    return await room.exec(
        program_command(python, name, *arguments),
        stdin=stdin,
        cwd="/",
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
    )
