"""Metadata of files, as extended attributes `user.e2b.KEY`, which E2B's envd uses.

Invariants:
- The attributes are set and read by a process inside the sandbox with the user's rights, which needs no program of the
  image. It follows no link when it reads.
- An upload with metadata replaces all that the file had; one without leaves it.
- What a sandbox reports is bounded, and text that is not UTF-8 is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace.sandboxes.base import ProgramRunner
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, unsupported
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox

HEADER: Final = "x-metadata-"
_KEY: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,200}")
_VALUE: Final = re.compile(r"[ -~]{0,4096}")
_MAX_KEYS: Final = 64
_MAX_BYTES: Final = 16 << 10
_MAX_OUTPUT_BYTES: Final = 32 << 20
_TIMEOUT_S: Final = 30.0
_PREFIX: Final = "user.e2b."
_UNSUPPORTED: Final = 95
# Both programs get JSON on standard input.
_SET: Final = f"""import json, os, sys
order = json.load(sys.stdin)
try:
    for path in order["paths"]:
        for name in os.listxattr(path):
            if name.startswith("{_PREFIX}"):
                os.removexattr(path, name)
        for key, value in order["metadata"].items():
            os.setxattr(path, "{_PREFIX}" + key, value.encode())
except OSError as error:
    sys.stderr.write(f"{{error.strerror}}: {{error.filename}}")
    sys.exit({_UNSUPPORTED} if error.errno == {_UNSUPPORTED} else 1)
"""
_GET: Final = f"""import json, os, sys
found, left = {{}}, {_MAX_OUTPUT_BYTES // 8}
for path in json.load(sys.stdin):
    metadata = {{}}
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith("{_PREFIX}") and left > 0:
                value = os.getxattr(path, name, follow_symlinks=False).decode(errors="replace")
                metadata[name[{len(_PREFIX)}:]] = value
                left -= len(name) + len(value)
    except OSError:
        continue
    if metadata:
        found[path] = metadata
json.dump(found, sys.stdout)
"""


def parse_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata in the headers of an upload, with keys in lower case. Raises ApiError 400."""
    found = {
        name.lower().removeprefix(HEADER): value for name, value in headers.items() if name.lower().startswith(HEADER)
    }
    for key, value in found.items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            message = (
                f"metadata {key[:80]!r}: needs a key of at most 200 letters, digits and !#$%&'*+-.^_`|~, and a value"
            )
            raise ApiError(400, f"{message} of printable ASCII")
    if len(found) > _MAX_KEYS or sum(len(key) + len(value) for key, value in found.items()) > _MAX_BYTES:
        raise ApiError(400, f"metadata: at most {_MAX_KEYS} keys and {_MAX_BYTES} bytes in total")
    return found


async def store_metadata(live: LiveSandbox, user: str, paths: Sequence[str], metadata: Mapping[str, str]) -> None:
    """Replace the metadata of files. Raises ApiError, SandboxError."""
    if not isinstance(live.handle, ProgramRunner):
        raise unsupported("metadata of a file")
    order = json.dumps({"paths": list(paths), "metadata": dict(metadata)}).encode()
    done = await live.handle.run_program(_SET, user=user, stdin=order, timeout_s=_TIMEOUT_S)
    if done.exit_code == _UNSUPPORTED:
        raise unsupported("metadata of a file on this file system (tmpfs needs Linux 6.6)")
    if done.exit_code != 0:
        raise ApiError(500, f"metadata: {done.stderr.decode(errors='replace')[:500]}")


async def add_metadata(live: LiveSandbox, user: str, entries: Sequence[dict[str, Any]]) -> None:
    """Add `metadata` to the entries of files that have some. Raises SandboxError."""
    if not entries or not isinstance(live.handle, ProgramRunner):
        return
    paths = json.dumps([entry["path"] for entry in entries]).encode()
    done = await live.handle.run_program(
        _GET, user=user, stdin=paths, timeout_s=_TIMEOUT_S, max_output_bytes=_MAX_OUTPUT_BYTES
    )
    try:
        found = json.loads(done.stdout) if done.exit_code == 0 else {}
    except ValueError:
        # The output was cut.
        found = {}
    for entry in entries:
        if metadata := found.get(entry["path"]):
            entry["metadata"] = metadata
