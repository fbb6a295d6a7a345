"""A patch as data: the text files under the declared data paths that differ from what the task put there.

Invariants:
- Only regular files travel: no symbolic link, device or directory of the agent is ever followed or created.
- Sizes and numbers are capped; what is over a cap refuses the whole patch (the model's doing: outcome invalid).
- Hidden files of the task always win over files of the same path in the patch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox

MAX_FILES, MAX_BYTES = 50, 1 << 20

# Runs in a clean sandbox over read-only data: prints {path: text} of regular files, at most MAX_FILES and MAX_BYTES.
_COLLECT = """
import json, os, stat, sys
roots, max_files, max_bytes = json.loads(sys.argv[1])
found, size = {}, 0
for root in roots:
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not stat.S_ISREG(os.lstat(path).st_mode):
                continue
            size += os.lstat(path).st_size
            if size > max_bytes or len(found) >= max_files:
                sys.exit(3)
            try:
                found[path] = open(path, encoding="utf-8", newline="").read()
            except UnicodeDecodeError:
                sys.exit(4)
json.dump(found, sys.stdout)
"""
_REFUSALS = {3: f"more than {MAX_FILES} files or {MAX_BYTES} bytes", 4: "a file is not UTF-8 text"}


class PatchRefused(Exception):
    """What the agent left cannot be a patch: over a cap, or not text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Paths (absolute, in the sandbox) with their new text, or None where the file is gone."""

    changes: Mapping[str, str | None]

    def applied_to(self, task: Task) -> dict[str, bytes]:
        """The files of a clean copy of the task with this patch and the hidden files."""
        files: dict[str, str] = dict(task.files)
        for path, text in self.changes.items():
            if text is None:
                files.pop(path, None)
            else:
                files[path] = text
        files.update(task.evaluator.hidden_files)
        return {path: text.encode() for path, text in files.items()}


async def collect_patch(task: Task, room: Sandbox) -> Patch:
    """Read the patch out of a clean sandbox in which the frozen data paths are mounted. Raises PatchRefused,
    SandboxError."""
    argument = json.dumps([list(task.evaluator.data_paths), MAX_FILES, MAX_BYTES])
    result = await room.exec(
        f"/usr/bin/python3 -I -S - '{argument}'",
        stdin=_COLLECT.encode(),
        cwd="/",
        timeout_s=task.evaluator.timeout_s,
        max_output_bytes=8 * MAX_BYTES,
    )
    if result.exit_code in _REFUSALS:
        raise PatchRefused(_REFUSALS[result.exit_code])
    if result.exit_code != 0 or result.truncated:
        raise SandboxError(f"collecting the patch ended with {result.exit_code}: {result.stderr[-200:]!r}")
    return difference(task.files, json.loads(result.stdout))


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> Patch:
    """What turns `before` into `after`."""
    changes: dict[str, str | None] = {path: text for path, text in after.items() if before.get(path) != text}
    changes |= {path: None for path in before if path not in after}
    return Patch(changes=changes)
