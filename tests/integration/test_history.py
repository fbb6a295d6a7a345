"""A repository whose future is hidden: in a real sandbox, with a real git, where the solution could be found before."""

from __future__ import annotations

import pytest

from headrace.actors.evaluation.graders.history import hide_history, leaks, prepare
from headrace.buffer.tasks.evaluators import EvaluatorSpec, RepositoryEvaluator
from headrace.buffer.tasks.repositories import EvalCommand, RepositorySpec
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.local.provider import LocalProvider

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
REPO = "/workspace/repo"
SOLUTION = "the solution of the task"
# A history with everything that may hold the gold commit: each is found by one of LOOK below before it is hidden.
MAKE = f"""
set -e
export GIT_CONFIG_GLOBAL=/tmp/config
git config --global user.name a; git config --global user.email a@example.invalid
git config --global init.defaultBranch main
mkdir -p {REPO} /workspace/origin; cd /workspace/origin; git init -q
echo base > code.txt; echo kept > '.gitignore'; git add -A; git commit -qm base; git tag v1
cd {REPO}; git clone -q /workspace/origin .
echo more >> code.txt; git commit -qam 'base 2'; base=$(git rev-parse HEAD)
echo '{SOLUTION}' > code.txt; git commit -qam gold; gold=$(git rev-parse HEAD)
git tag later; git tag -a -m x annotated; git branch other; git notes add -m '{SOLUTION}'
git update-ref refs/remotes/origin/next $gold; git update-ref refs/pull/7/head $gold
git worktree add -q /workspace/tree $gold
echo '{SOLUTION} again' > code.txt; git stash -q
git pack-refs --all; git repack -adq
git reset -q --hard $base; git replace $base $gold
git update-ref ORIG_HEAD $gold; echo "$gold branch 'x'" > .git/FETCH_HEAD; echo $gold > .git/MERGE_HEAD
echo '{SOLUTION} staged' | git hash-object -w --stdin > /dev/null
echo '{SOLUTION} 2' > /workspace/origin/code.txt; git -C /workspace/origin commit -qam gold2
echo /workspace/origin/.git/objects > .git/objects/info/alternates
git init -q nested; cd nested; echo a > f; git add f; git commit -qm a
echo '{SOLUTION}' > f; git commit -qam gold; git reset -q --hard HEAD~1
echo $base > /tmp/base
"""
LOOK = {
    "fsck": "git fsck --lost-found --no-reflogs 2>/dev/null | grep -E 'commit|blob'",
    "log": "git log --all -p | grep '{solution}'",
    "reflog": "git reflog --all | grep gold",
    "objects": "git cat-file --batch-all-objects --batch | grep -a '{solution}'",
    "stash": "git stash list | grep .",
    "notes": "git notes list | grep .",
    "tags": "git tag | grep .",
    "replaced": "git replace -l | grep .",
    "worktrees": "git worktree list | grep tree",
    "remotes": "git remote -v | grep .",
    "heads": "ls .git | grep -E '(ORIG|FETCH|MERGE)_HEAD'",
    "nested": "cd nested && git cat-file --batch-all-objects --batch | grep -a '{solution}'",
}


async def made(provider: LocalProvider) -> Sandbox:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    result = await sandbox.exec(MAKE, timeout_s=60)
    assert result.exit_code == 0, result
    return sandbox


async def findings(sandbox: Sandbox) -> list[str]:
    """Names of the ways that find something of the future."""
    script = "\n".join(
        f"( {look.replace('{solution}', SOLUTION)} ) > /dev/null 2>&1 && echo {name}" for name, look in LOOK.items()
    )
    return (await sandbox.exec(f"{script}\ntrue", cwd=REPO, timeout_s=60)).stdout.decode().split()


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, cwd=REPO, timeout_s=30)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def test_nothing_after_the_base_commit_can_be_found_once_history_is_hidden(provider: LocalProvider) -> None:
    sandbox = await made(provider)
    assert await findings(sandbox) == list(LOOK)
    assert await leaks(sandbox, REPO)
    state = "export GIT_NO_REPLACE_OBJECTS=1; cat /tmp/base; cat code.txt; git status --porcelain; git log --oneline"
    before = await output(sandbox, state)
    await hide_history(sandbox, REPO)
    assert await findings(sandbox) == []
    assert await leaks(sandbox, REPO) == ()
    assert await output(sandbox, state) == before
    assert await output(sandbox, "git rev-parse HEAD") == before.split()[0]
    assert await output(sandbox, "git for-each-ref --format='%(refname)'") == "refs/heads/main"
    await sandbox.kill()


async def test_an_agent_can_keep_working_in_a_repository_with_hidden_history(provider: LocalProvider) -> None:
    sandbox = await made(provider)
    await sandbox.exec("chown -R agent:agent .", cwd=REPO, timeout_s=30)
    await hide_history(sandbox, REPO)
    commit = "git -c user.name=a -c user.email=a@example.invalid commit -qam mine"
    work = f"echo new >> code.txt && {commit} && git stash list && git diff HEAD~1"
    result = await sandbox.exec(work, user="agent", cwd=REPO, timeout_s=30)
    assert (result.exit_code, b"+new" in result.stdout) == (0, True), result
    await sandbox.kill()


@pytest.mark.parametrize(
    "leak",
    [
        f"echo '{SOLUTION}' | git hash-object -w --stdin",
        "git tag leaked",
        "git update-ref refs/remotes/origin/x HEAD",
        "cp .git/HEAD .git/ORIG_HEAD",
        "mkdir -p .git/logs; echo x > .git/logs/HEAD",
        "echo /nowhere > .git/objects/info/alternates",
        f"cd nested; echo '{SOLUTION}' | git hash-object -w --stdin",
    ],
)
async def test_the_leak_check_finds_every_leak(provider: LocalProvider, leak: str) -> None:
    sandbox = await made(provider)
    await hide_history(sandbox, REPO)
    await output(sandbox, leak)
    assert await leaks(sandbox, REPO)
    await sandbox.kill()


async def test_preparing_a_repository_checks_out_the_base_commit_and_hides_the_rest(provider: LocalProvider) -> None:
    sandbox = await made(provider)
    base = await output(sandbox, "cat /tmp/base")
    await sandbox.exec("git checkout -q -f later", cwd=REPO, timeout_s=30)
    spec = RepositorySpec(
        workdir=REPO, grader=EvalCommand(command="true"), base_commit=base, prepare=("echo p > prepared",)
    )
    evaluator = RepositoryEvaluator(repository=spec)
    await prepare(Task(id=TaskId("t"), family="f", instruction="i", evaluator=evaluator), sandbox)
    assert await output(sandbox, "git rev-parse HEAD; cat prepared") == f"{base}\np"
    assert await findings(sandbox) == []
    with pytest.raises(SandboxError, match="preparing /workspace/repo failed with"):
        await prepare(
            Task(id=TaskId("t"), family="f", instruction="i", evaluator=evaluator_for("no-such-commit")), sandbox
        )
    await sandbox.kill()


def evaluator_for(base_commit: str) -> EvaluatorSpec:
    spec = RepositorySpec(workdir=REPO, grader=EvalCommand(command="true"), base_commit=base_commit)
    return RepositoryEvaluator(repository=spec)


async def test_a_folder_without_a_repository_is_left_unchanged(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await sandbox.exec("echo x > /workspace/f", timeout_s=30)
    await hide_history(sandbox, "/workspace")
    assert (await sandbox.exec("cat /workspace/f; ls -A", timeout_s=30)).stdout == b"x\nf\n"
    await sandbox.kill()
