"""Collects an agent's changes to its repository as a git diff, without running any of the agent's code.

Invariant: the frozen tree is mounted read-only beside a pristine one; `in_sandbox.collect` computes the diff.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.actors.evaluation.graders.diff_filter import Dropped, DropReason
from headrace.actors.evaluation.graders.history import lay_out
from headrace.actors.evaluation.graders.verdict import (
    CleanSandboxes,
    EvaluationRequest,
    PatchRefused,
    ProgramFailed,
    clean_spec,
    collect_twice,
)
from headrace.actors.evaluation.in_sandbox import program_command
from headrace.actors.record.files.parts import in_part
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.breakdown import EVALUATE_COLLECT
from headrace.sandboxes.base import FrozenMount

MAX_ENTRIES, MAX_FILES, MAX_FILE_BYTES = 500_000, 1000, 1 << 20
MAX_DIFF_BYTES: Final = 32 << 20
_LEFT: Final = "/tmp/left-by-the-agent"
_REFUSALS: Final = {3: f"more than {MAX_ENTRIES} files and folders", 5: "a path is too long"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftDiff:
    """Diff of an agent's files. `base` has the old content of changed files whose sections are filtered; `notes` lists
    changes that are not in the diff."""

    diff: bytes = b""
    base: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[Dropped, ...] = ()


async def collect_diff(
    spec: RepositoryEvaluator, task: Task, request: EvaluationRequest, sandboxes: CleanSandboxes
) -> LeftDiff:
    """Collect the diff. Raises PatchRefused, SandboxError (FrozenPathRefused if the agent removed the repository)."""
    mount = FrozenMount(source=request.sandbox.id, path=spec.repository.workdir, target=_LEFT)
    return await collect_twice(lambda untouched: _collect(task, spec, sandboxes, () if untouched else (mount,)))


async def _collect(
    task: Task, spec: RepositoryEvaluator, sandboxes: CleanSandboxes, mounts: tuple[FrozenMount, ...]
) -> LeftDiff:
    """Compare the mounted tree, or without one the pristine tree itself, with the pristine tree. Raises PatchRefused,
    ProgramFailed, SandboxError."""
    repository, caps = spec.repository, [MAX_ENTRIES, MAX_FILES, MAX_FILE_BYTES]
    argument = json.dumps({"base": repository.workdir, "left": _LEFT if mounts else repository.workdir, "caps": caps})
    async with sandboxes.clean(clean_spec(task, mounts)) as sandbox:
        with in_part(EVALUATE_COLLECT):
            await lay_out(task, sandbox)
            result = await sandbox.exec(
                program_command(repository.python, "collect", argument),
                cwd="/",
                timeout_s=spec.timeout_s,
                max_output_bytes=MAX_DIFF_BYTES,
            )
    if result.exit_code in _REFUSALS:
        raise PatchRefused(_REFUSALS[result.exit_code])
    if result.truncated:
        raise PatchRefused(f"the diff is larger than {MAX_DIFF_BYTES} bytes")
    if result.exit_code != 0:
        code = result.exit_code
        raise ProgramFailed(f"collecting the diff failed with exit code {code}: {result.stderr[-200:]!r}")
    try:
        return parse_collected(result.stdout)
    except ValueError as error:
        raise ProgramFailed(f"collecting the diff: {repository.python} printed {result.stdout[:200]!r}") from error


def parse_collected(stdout: bytes) -> LeftDiff:
    """Return what `in_sandbox.collect` has printed. Raises ValueError."""
    header, _, diff = stdout.partition(b"\n")
    found = json.loads(header)
    return LeftDiff(
        diff=diff,
        base={path: bytes.fromhex(content) for path, content in found["settings"].items()},
        notes=tuple(Dropped(path=path, reason=DropReason(reason)) for path, reason in found["notes"]),
    )
