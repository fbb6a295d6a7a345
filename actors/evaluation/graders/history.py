"""The removal of a repository's future history, so that an agent cannot find the commit that solves its task.

Invariants:
- Afterwards the object store holds exactly the objects reachable from HEAD, and HEAD is the only reference. `leaks`
  verifies this.
- The repository is rebuilt from those objects instead of being cleaned, so nothing can be overlooked: reflogs,
  ORIG_HEAD, FETCH_HEAD, stash, notes, replacements, other branches, tags, remotes, worktrees, alternates, hooks and
  unreachable objects are not copied. The work tree is unchanged; repositories within it are rebuilt too.
- After `prepare`, the repository's history does not contain the task's solution. Hidden files and tests are not written
  here, but after the agent has ended.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import Final

from headrace.buffer.tasks.repositories import RepositorySpec
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import SandboxError

_TIMEOUT_S: Final = 600.0
_CLEAN_GIT: Final = """
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C
git() { command git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c gc.auto=0 "$@"; }
"""
# Deepest first, since the repository of a submodule may be inside that of its parent. A repository without commits has
# no history.
_REBUILD: Final = (
    _CLEAN_GIT
    + """
set -euo pipefail
rebuild() {
  cd "$1"
  local new branch format
  if ! git rev-parse -q --verify HEAD^{commit} > /dev/null; then
    return 0
  fi
  new=$(mktemp -d "$1/.git-new.XXXXXX")
  format=$(git rev-parse --show-object-format)
  branch=$(git symbolic-ref -q HEAD || echo refs/heads/main)
  GIT_DIR="$new" command git init -q --bare --template= --object-format="$format"
  git rev-parse HEAD | git pack-objects -q --revs --stdout | GIT_DIR="$new" command git index-pack --stdin > /dev/null
  local old shallow
  old=$(git rev-parse --git-common-dir)
  if [ -f "$old/shallow" ]; then cp "$old/shallow" "$new/shallow"; fi
  mkdir -p "$new/info"
  if [ -f "$old/info/exclude" ]; then cp "$old/info/exclude" "$new/info/exclude"; fi
  GIT_DIR="$new" command git update-ref --no-deref "$branch" "$(git rev-parse HEAD)"
  GIT_DIR="$new" command git symbolic-ref HEAD "$branch"
  GIT_DIR="$new" command git config core.bare false
  GIT_DIR="$new" command git config core.logAllRefUpdates true
  rm -rf "$new/logs" .git
  mv "$new" .git
  git read-tree HEAD
  git update-index -q --refresh || true
  chown -R --reference=. .git
}
cd "$(git rev-parse --show-toplevel 2> /dev/null || pwd)"
find "$PWD" -depth -name .git -print0 | while IFS= read -r -d '' found; do
  ( rebuild "$(dirname "$found")" ) < /dev/null
done
"""
)
# Prints stored objects that HEAD does not reach, and other references and alternates; the output must be empty.
_LEAKS: Final = (
    _CLEAN_GIT
    + """
set -euo pipefail
cd "$(git rev-parse --show-toplevel 2> /dev/null || pwd)"
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
find "$PWD" -name .git -print0 | while IFS= read -r -d '' found; do
  cd "$(dirname "$found")"
  git rev-parse -q --verify HEAD^{commit} > /dev/null || continue
  git cat-file --batch-all-objects --unordered --batch-check='%(objectname)' | sort -u > "$lists/stored"
  git rev-list --objects --no-object-names HEAD | sort -u > "$lists/reached"
  comm -23 "$lists/stored" "$lists/reached" | sed 's/^/object /'
  branch=$(git symbolic-ref -q HEAD || true)
  git for-each-ref --format='%(refname)' | { grep -vxF "$branch" || true; } | sed 's/^/ref /'
  folder=$(git rev-parse --git-common-dir)
  find "$folder" \\( -name ORIG_HEAD -o -name FETCH_HEAD -o -name '*_HEAD' -o -name logs -o -name worktrees \\
    -o -name alternates -o -name packed-refs -o -name modules -o -name rr-cache \\) -printf 'file %P\\n'
done
"""
)


PREPARE_TIMEOUT_S: Final = 600.0
"""Guard against hangs; the deadline of the phase is shorter."""
GIT: Final = "git --no-replace-objects -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false"

ANY_OWNER: Final = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Environment for a task's commands, since git by default refuses trees owned by other users."""


# An image of somebody's has the accounts that its own programs need, and no others.
_ACCOUNT: Final = """
name=$1 number=1000
id -u "$name" > /dev/null 2>&1 && exit 0
while cut -d: -f3 /etc/passwd /etc/group | grep -qx "$number"; do number=$((number + 1)); done
for file in /etc/passwd /etc/group; do [ -z "$(tail -c 1 "$file")" ] || echo >> "$file"; done
echo "$name:x:$number:$number:$name:/home/$name:/bin/sh" >> /etc/passwd
echo "$name:x:$number:" >> /etc/group
mkdir -p "/home/$name" && chown "$number:$number" "/home/$name"
"""


async def make_account(sandbox: Sandbox, name: str) -> None:
    """Create an account in a sandbox whose image lacks it. Raises SandboxError."""
    if name == "root" or name.isdigit():
        return
    result = await sandbox.exec(f"set -- {shlex.quote(name)}\n{_ACCOUNT}", cwd="/", timeout_s=_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(
            f"the account {name!r} could not be created: {result.stderr[-200:].decode(errors='replace')}"
        )


async def prepare(task: Task, sandbox: Sandbox) -> None:
    """Prepare an agent's sandbox. Raises SandboxError."""
    await lay_out(task, sandbox)
    if task.repository is not None:
        await hide_history(sandbox, task.repository.workdir)


async def lay_out(task: Task, sandbox: Sandbox) -> None:
    """Create the user of a task's tests, check out its base commit, write its files and run its commands. Raises
    SandboxError."""
    repository = task.repository
    if repository is not None:
        await make_account(sandbox, repository.user)
    if repository is not None and repository.base_commit:
        await _run(sandbox, repository, f"{GIT} checkout -q -f --detach {shlex.quote(repository.base_commit)}")
    if files := await task_files(task):
        await sandbox.write_many(files)
    if repository is not None and repository.prepare:
        await _run(sandbox, repository, "\n".join(repository.prepare))


async def task_files(task: Task) -> dict[str, bytes]:
    """Return a task's own files, text and binary, by path. Raises TaskFileError for a binary file that has changed."""
    files = {path: text.encode() for path, text in task.files.items()}
    return files | {path: await asyncio.to_thread(binary.read) for path, binary in task.binary_files.items()}


async def _run(sandbox: Sandbox, repository: RepositorySpec, script: str) -> None:
    command = f"set -e\n{script}"
    result = await sandbox.exec(command, env=ANY_OWNER, cwd=repository.workdir, timeout_s=PREPARE_TIMEOUT_S)
    if result.exit_code != 0:
        output = (result.stdout + result.stderr)[-300:].decode(errors="replace")
        raise SandboxError(f"preparing {repository.workdir} failed with exit code {result.exit_code}: {output}")


async def hide_history(sandbox: Sandbox, workdir: str) -> None:
    """Rebuild the repository at `workdir` (and any repositories within it) from the objects reachable from HEAD; a
    plain folder is left unchanged.

    Raises SandboxError, including when forbidden objects remain."""
    result = await sandbox.exec(_REBUILD, cwd=workdir, timeout_s=_TIMEOUT_S)
    if result.exit_code != 0:
        output = (result.stdout + result.stderr)[-300:].decode(errors="replace")
        raise SandboxError(
            f"removing the history of {shlex.quote(workdir)} failed with exit code {result.exit_code}: {output}"
        )
    left = await leaks(sandbox, workdir)
    if left:
        raise SandboxError(f"the history of {shlex.quote(workdir)} still contains {', '.join(left[:5])}")


async def leaks(sandbox: Sandbox, workdir: str) -> tuple[str, ...]:
    """Return everything in the repository at `workdir` that is not reachable from HEAD, as lines `object NAME`, `ref
    NAME` and `file PATH`. Raises SandboxError."""
    result = await sandbox.exec(_LEAKS, cwd=workdir, timeout_s=_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(f"looking for leaks in {shlex.quote(workdir)} failed: {result.stderr[-300:]!r}")
    return tuple(result.stdout.decode(errors="replace").split("\n")[:-1])
