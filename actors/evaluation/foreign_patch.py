"""Applies patches of agents to clean repositories for callers without a headrace task (the drop-in servers).

Invariant: filter and program are those of tasks of kind repository; dropped changes are logged.
"""

from __future__ import annotations

import logging
import secrets
import shlex
from contextlib import suppress
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


async def apply_patch(sandbox: Sandbox, diff: bytes, cwd: str, timeout_s: float) -> str | None:
    """Apply the filtered `diff` to the repository at `cwd`; return the reason if that is impossible. Raises
    SandboxError."""
    try:
        # The old content of the changed files of which the filter keeps the test sections.
        base = {}
        for path in {file.old_path for file in parse_diff(diff) if file.old_path is not None}:
            if path.rsplit("/", 1)[-1] in SECTIONED and ".." not in path.split("/"):
                # The filter drops changes of files that are missing or not regular.
                with suppress(SandboxFileError):
                    base[path] = await sandbox.read(f"{cwd}/{path}", max_bytes=_MAX_SETTINGS_BYTES)
        filtered = filter_diff(diff, FilterRules(), base)
    except DiffRefused as error:
        return str(error)
    if filtered.dropped:
        logger.info("sandbox %s: %s", sandbox.id, summary(filtered.dropped))
    folder = f"/tmp/{secrets.token_hex(8)}"
    await sandbox.write_many({f"{folder}/agent.diff": filtered.diff, f"{folder}/tests.diff": b""})
    # Task images put their Python on the PATH of login shells.
    in_login_shell = f"exec bash -lc {shlex.quote('exec ' + program_command('python3', 'apply', folder))}"
    result = await sandbox.exec(in_login_shell, cwd=cwd, timeout_s=timeout_s)
    reason = result.stderr[-300:].decode(errors="replace").strip()
    if result.exit_code == AGENT_REFUSED:
        return reason
    if result.exit_code != 0:
        raise SandboxError(f"the patch could not be applied ({result.exit_code}): {reason}")
    return None
