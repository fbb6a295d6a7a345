"""Programs that are sent to clean sandboxes as source code and run inside them.

They need only the standard library of Python 3.7 or later, and import nothing from headrace. Under an older Python they
exit with TOO_OLD and a message.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from headrace.sandboxes.base import DEFAULT_MAX_OUTPUT_BYTES, ExecResult, ProgramRunner, Sandbox

ISOLATED: Final = "-I -S"
"""Python options: no environment variables, no user site, no site customization."""
TOO_OLD: Final = 67
_START: Final = f"""\
import sys
if sys.version_info < (3, 7):
    sys.stderr.write("needs Python 3.7 or later, and this is " + sys.version.split()[0] + "\\n")
    sys.exit({TOO_OLD})
exec(sys.argv.pop(1))
"""
"""Any Python version can run this and print the message; under an old version, the programs themselves would fail with
a syntax error, whose exit code 1 would look like a failed check."""


def program_command(python: str, name: str, *arguments: str, options: str = ISOLATED) -> str:
    """Return the shell command that runs a program; `options` are Python's command-line options."""
    return f"{python} {options} {shlex.join(['-c', _START, source(name), *arguments])}"


@cache
def source(name: str) -> str:
    """Return the source of a program in this folder."""
    return files(__name__).joinpath(f"{name}.py").read_text(encoding="utf-8")


async def run_program(
    sandbox: Sandbox,
    name: str,
    arguments: Sequence[str] = (),
    *,
    python: str,
    stdin: bytes = b"",
    timeout_s: float,
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
) -> ExecResult:
    """Run a program that needs nothing from the image, as root: without a new interpreter if the sandbox supports that,
    otherwise with the image's `python`. Raises ExecTimeout, SandboxError."""
    if isinstance(sandbox, ProgramRunner):
        return await sandbox.run_program(
            source(name), arguments, stdin=stdin, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )
    return await sandbox.exec(
        program_command(python, name, *arguments),
        stdin=stdin,
        cwd="/",
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
    )
