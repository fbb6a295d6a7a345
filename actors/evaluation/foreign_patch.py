"""Applying an agent's patch to a clean repository for callers that have no task of ours: the drop-in's `evaluate`.

Invariant: the same filter and the same program as for tasks of kind repository; what was dropped is logged.
"""

from __future__ import annotations

import logging
import secrets
import shlex
from typing import TYPE_CHECKING, Final

from headrace.actors.evaluation.diff_filter import FilterRules, filter_diff, summary
from headrace.actors.evaluation.settings_sections import SECTIONED
from headrace.actors.evaluation.unified_diff import DiffRefused, parse_diff
from headrace.actors.in_sandbox import program_command
from headrace.actors.in_sandbox.apply import AGENT_REFUSED
from headrace.sandboxes.errors import SandboxError, SandboxFileError

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox

_MAX_SETTINGS_BYTES: Final = 1 << 20

logger = logging.getLogger(__name__)


async def apply_patch(room: Sandbox, diff: bytes, cwd: str, timeout_s: float) -> str | None:
    """Apply what the filter leaves of `diff` to the repository at `cwd`; the reason when that is impossible. Raises
    SandboxError."""
    try:
        filtered = filter_diff(diff, FilterRules(), await _settings(room, diff, cwd))
    except DiffRefused as error:
        return str(error)
    if filtered.dropped:
        logger.info("sandbox %s: %s", room.id, summary(filtered.dropped))
    folder = f"/tmp/{secrets.token_hex(8)}"
    await room.write_many({f"{folder}/agent.diff": filtered.diff, f"{folder}/tests.diff": b""})
    # A login shell, because that is where images of tasks have their Python.
    in_login_shell = f"exec bash -lc {shlex.quote('exec ' + program_command('python3', 'apply', folder))}"
    result = await room.exec(in_login_shell, cwd=cwd, timeout_s=timeout_s)
    said = result.stderr[-300:].decode(errors="replace").strip()
    if result.exit_code == AGENT_REFUSED:
        return said
    if result.exit_code != 0:
        raise SandboxError(f"the patch could not be applied ({result.exit_code}): {said}")
    return None


async def _settings(room: Sandbox, diff: bytes, cwd: str) -> dict[str, bytes]:
    """Old content of the changed files of which only sections are the agent's. Raises DiffRefused."""
    paths = {file.old_path for file in parse_diff(diff) if file.old_path is not None}
    found = {}
    for path in paths:
        if path.rsplit("/", 1)[-1] in SECTIONED and ".." not in path.split("/"):
            try:
                found[path] = await room.read(f"{cwd}/{path}", max_bytes=_MAX_SETTINGS_BYTES)
            except SandboxFileError:
                # Not there, or no plain file: the filter drops its change.
                continue
    return found
