"""The patch of a rollout as data: text files under the declared data paths that differ from those of the task.

Invariants:
- Only regular files are copied: none of the agent's symbolic links, devices or directories is followed or created.
- Files that are not UTF-8 text are not part of a patch: fresh copies keep the task's own. Otherwise a compiled module
  of the agent could stand in for the source of a hidden test.
- Sizes, counts and path lengths are capped; a patch that exceeds a cap is refused as a whole, with outcome invalid.
- The task's files outside the data paths are unchanged.
- The task's hidden files take precedence: no file in the patch is at, above or below their paths.
- The filter and the program that applies patches are those used for tasks of kind repository; dropped changes are
  logged.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from typing import Final

from headrace.actors.evaluation.graders.diff_filter import (
    SECTIONED,
    Dropped,
    DropReason,
    FilterRules,
    filter_diff,
    reason_for_path,
    summary,
)
from headrace.actors.evaluation.graders.verdict import PatchRefused, ProgramFailed
from headrace.actors.evaluation.in_sandbox import program_command, run_program
from headrace.actors.evaluation.in_sandbox.apply import AGENT_REFUSED
from headrace.actors.record.files.parts import in_part
from headrace.buffer.tasks.evaluators import PythonEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.tasks.unified_diff import DiffRefused, parse_diff
from headrace.buffer.trajectories.breakdown import EVALUATE_COLLECT
from headrace.buffer.trajectories.sanitizer import clean_text
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import SandboxError, SandboxFileError

MAX_FILES, MAX_FOLDERS, MAX_BYTES = 50, 1000, 1 << 20
MAX_COMPARED_LINES = 200

_REFUSALS = {
    3: f"more than {MAX_FILES} text files, {MAX_FOLDERS} folders and binary files, or {MAX_BYTES} bytes of text",
    5: "a path is too long",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Absolute sandbox paths with their new text, or None for removed files. `dropped` lists the files that are not
    text, except for those of the task with their size."""

    changes: Mapping[str, str | None]
    dropped: tuple[Dropped, ...] = ()

    def applied_to(self, files: Mapping[str, bytes], hidden: Mapping[str, str]) -> dict[str, bytes]:
        """Return a task's own files with this patch and the hidden files applied."""
        patched = dict(files)
        for path, text in self.changes.items():
            if text is None:
                patched.pop(path, None)
            else:
                patched[path] = text.encode()
        patched = {
            path: content
            for path, content in patched.items()
            if not any(_is_below(path, other) or _is_below(other, path) for other in hidden)
        }
        return patched | {path: text.encode() for path, text in hidden.items()}

    def as_diff(self, task: Task) -> str:
        """Return a unified diff against the task's files, ordered by path."""
        return "".join(file_diff(path, task.files.get(path), self.changes[path]) for path in sorted(self.changes))

    def filtered(self, task: Task, test_files: Sequence[str]) -> Patch:
        """Return the patch without `test_files` and without changes that `diff_filter` forbids, which it lists as
        dropped."""
        tests = frozenset(path[1:] for path in test_files)
        reasons = {path: reason_for_path(path[1:], tests, new=path not in task.files) for path in self.changes}
        dropped = tuple(Dropped(path=path, reason=reason) for path, reason in reasons.items() if reason is not None)
        kept = {path: text for path, text in self.changes.items() if reasons[path] is None}
        return Patch(changes=kept, dropped=(*self.dropped, *dropped))


async def collect_patch(task: Task, sandbox: Sandbox) -> Patch:
    """Read the patch from a clean sandbox in which the frozen data paths are mounted. Raises PatchRefused,
    ProgramFailed, SandboxError."""
    spec = task.evaluator
    assert isinstance(spec, PythonEvaluator)
    argument = json.dumps([spec.data_paths, MAX_FILES, MAX_FOLDERS, MAX_BYTES])
    with in_part(EVALUATE_COLLECT):
        result = await run_program(
            sandbox,
            "collect_files",
            [argument],
            python=spec.python,
            timeout_s=spec.timeout_s,
            max_output_bytes=8 * MAX_BYTES,
        )
    if result.exit_code in _REFUSALS:
        raise PatchRefused(_REFUSALS[result.exit_code])
    if result.exit_code != 0 or result.truncated:
        code = result.exit_code
        raise ProgramFailed(f"collecting the patch failed with exit code {code}: {result.stderr[-200:]!r}")
    texts, binary = json.loads(result.stdout)
    before = files_below(task.files, spec.data_paths)
    patch = difference({path: text for path, text in before.items() if path not in binary}, texts)
    own = {path: file.size for path, file in task.binary_files.items()}
    dropped = [Dropped(path=path, reason=DropReason.BINARY) for path in sorted(binary) if binary[path] != own.get(path)]
    # Not every provider can write to a path that is not UTF-8.
    odd = {path for path in patch.changes if clean_text(path) != path}
    dropped += [Dropped(path=path, reason=DropReason.PATH) for path in sorted(odd)]
    kept = {path: text for path, text in patch.changes.items() if path not in odd}
    return Patch(changes=kept, dropped=tuple(dropped))


def file_diff(path: str, before: str | None, after: str | None) -> str:
    """Return the unified diff of one file; None stands for a file that does not exist. Long files are replaced as a
    whole, since computing the shortest diff of hostile text may take forever."""
    # Split at line feeds only: str.splitlines also splits at other characters.
    old, new = ([line for line in re.split("(?<=\n)", text or "") if line] for text in (before, after))
    name = path if path.isprintable() else json.dumps(path)
    names = ("/dev/null" if before is None else f"a{name}", "/dev/null" if after is None else f"b{name}")
    if max(len(old), len(new)) <= MAX_COMPARED_LINES:
        lines = list(unified_diff(old, new, *names))
    else:
        header = [f"--- {names[0]}\n", f"+++ {names[1]}\n", f"@@ -1,{len(old)} +1,{len(new)} @@\n"]
        lines = [*header, *(f"-{line}" for line in old), *(f"+{line}" for line in new)]
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def files_below(files: Mapping[str, str], data_paths: Sequence[str]) -> dict[str, str]:
    """Return the files that are at or below one of the data paths."""
    return {path: text for path, text in files.items() if any(_is_below(path, data_path) for data_path in data_paths)}


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> Patch:
    """Return the patch that turns `before` into `after`."""
    changes: dict[str, str | None] = {path: text for path, text in after.items() if before.get(path) != text}
    changes |= {path: None for path in before if path not in after}
    return Patch(changes=changes)


_MAX_SETTINGS_BYTES: Final = 1 << 20

logger = logging.getLogger(__name__)


async def apply_patch(sandbox: Sandbox, diff: bytes, cwd: str, timeout_s: float) -> str | None:
    """Apply the filtered `diff` to the repository at `cwd`. Returns the reason if it cannot be applied. Raises
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
