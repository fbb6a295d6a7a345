"""What is done to a sandbox before an agent starts, and to every clean one that stands for its beginning.

Invariant: `prepare` ends with nothing of the task's solution in the repository's history; hidden files and tests of a
task are none of its business, they arrive after the agent is dead.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from headrace.actors.evaluation.history import hide_history
from headrace.sandboxes.errors import SandboxError

if TYPE_CHECKING:
    from headrace.buffer.repositories import RepositorySpec
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox

PREPARE_TIMEOUT_S: Final = 600.0
"""A hang guard; the phase's own deadline is shorter."""
GIT: Final = "git --no-replace-objects -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false"

ANY_OWNER: Final = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Environment of commands of a task: git refuses a tree that belongs to another user than the one who runs it."""


async def prepare(task: Task, sandbox: Sandbox) -> None:
    """The agent's sandbox as it finds it. Raises SandboxError."""
    await lay_out(task, sandbox)
    if task.evaluator.repository is not None:
        await hide_history(sandbox, task.evaluator.repository.workdir)


async def lay_out(task: Task, sandbox: Sandbox) -> None:
    """Base commit, files and preparing commands of a task. Raises SandboxError."""
    repository = task.evaluator.repository
    if repository is not None and repository.base_commit:
        await _run(sandbox, repository, f"{GIT} checkout -q -f --detach {shlex.quote(repository.base_commit)}")
    if task.files:
        await sandbox.write_many({path: text.encode() for path, text in task.files.items()})
    if repository is not None and repository.prepare:
        await _run(sandbox, repository, "\n".join(repository.prepare))


async def _run(sandbox: Sandbox, repository: RepositorySpec, script: str) -> None:
    command = f"set -e\n{script}"
    result = await sandbox.exec(command, env=ANY_OWNER, cwd=repository.workdir, timeout_s=PREPARE_TIMEOUT_S)
    if result.exit_code != 0:
        said = (result.stdout + result.stderr)[-300:].decode(errors="replace")
        raise SandboxError(f"preparing {repository.workdir} ended with {result.exit_code}: {said}")
