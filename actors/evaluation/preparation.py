"""The preparation of sandboxes: task files and commands, before an agent starts and in every clean copy.

Invariant: after `prepare` the history of the repository does not contain the solution of the task. Hidden files and
tests are not written here, but after the end of the agent.
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
"""Guard against hangs; the deadline of the phase is shorter."""
GIT: Final = "git --no-replace-objects -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false"

ANY_OWNER: Final = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Environment for commands of a task, since git refuses trees of other users by default."""


async def prepare(task: Task, sandbox: Sandbox) -> None:
    """Prepare the sandbox of an agent. Raises SandboxError."""
    await lay_out(task, sandbox)
    if task.evaluator.repository is not None:
        await hide_history(sandbox, task.evaluator.repository.workdir)


async def lay_out(task: Task, sandbox: Sandbox) -> None:
    """Check out the base commit, write the files and run the commands of a task. Raises SandboxError."""
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
        output = (result.stdout + result.stderr)[-300:].decode(errors="replace")
        raise SandboxError(f"preparing {repository.workdir} failed with exit code {result.exit_code}: {output}")
