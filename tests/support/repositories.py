"""Small git repositories for evaluator tests: made inside sandboxes, with a real pytest as the image would have it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benches.cheating import cheat_bench

from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.evaluation.graders.history import prepare
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.repositories import RepositorySpec, TestIds
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider
from support.clean_sandboxes import CleanSandboxes

REPO = "/workspace/calc"
PYTEST = "/opt/pytest"
COMMIT = (
    "git init -q -b main . && git add -A && git -c user.name=a -c user.email=a@example.invalid commit -q -m base "
    "&& chown -R agent:agent ."
)
WRONG = "def mean(numbers):\n    return sum(numbers) / len(numbers)\n\n\ndef last(numbers):\n    return numbers[-1]\n"
RIGHT = WRONG.replace("return sum", "if not numbers:\n        return 0.0\n    return sum", 1)
TESTS = """\
from calc import last, mean


def test_mean():
    assert mean([1, 3]) == 2


def test_last():
    assert last([1, 3]) == 3
"""
HIDDEN_TESTS = TESTS + "\n\ndef test_mean_of_nothing():\n    assert mean([]) == 0.0\n"
FILES = {
    f"{REPO}/calc.py": WRONG,
    f"{REPO}/tests/test_calc.py": TESTS,
    f"{REPO}/tests/conftest.py": "",
    f"{REPO}/pyproject.toml": '[project]\nname = "calc"\n\n[tool.pytest.ini_options]\naddopts = "--strict-markers"\n',
}
IDS = TestIds(
    fail_to_pass=("tests/test_calc.py::test_mean_of_nothing",),
    pass_to_pass=("tests/test_calc.py::test_mean", "tests/test_calc.py::test_last"),
)
SPEC = RepositorySpec(workdir=REPO, grader=IDS, prepare=(COMMIT,), environment={"PYTHONPATH": f"{PYTEST}:{REPO}"})


def repository_task(spec: RepositorySpec = SPEC, **evaluator: object) -> Task:
    """Mend `mean` so that it takes an empty list; the test of that is hidden."""
    fields: dict[str, object] = {"hidden_files": {f"{REPO}/tests/test_calc.py": HIDDEN_TESTS}, "timeout_s": 20.0}
    return Task(
        id=TaskId("calc"),
        family="calc",
        instruction="mean([]) raises ZeroDivisionError, it should be 0.0",
        files=FILES,
        evaluator=RepositoryEvaluator(repository=spec, **(fields | evaluator)),  # type: ignore[arg-type]
    )


async def install_pytest(sandbox: Sandbox) -> None:
    """What the image of such a task brings."""
    await cheat_bench.install_packages(sandbox, cheat_bench.pytest_archive(), PYTEST)


class PytestSandboxes(CleanSandboxes):
    """Clean sandboxes with pytest. Those with mounts only collect or apply a patch, and need none."""

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with super().clean(spec) as sandbox:
            if not spec.mounts:
                await install_pytest(sandbox)
            yield sandbox


async def exit_code_of_tests(provider: LocalProvider, task: Task, command: str) -> int:
    """What grading by exit code in a clean sandbox sees: the agent's tree with the hidden tests laid over it."""
    sandbox = await provider.attach(await provider.create(SandboxSpec(image=task.image)))
    try:
        await install_pytest(sandbox)
        await prepare(task, sandbox)
        await sandbox.exec(command, cwd=REPO, timeout_s=30)
        assert isinstance(task.evaluator, RepositoryEvaluator)
        await sandbox.write_many({path: text.encode() for path, text in task.evaluator.hidden_files.items()})
        tests = f"/usr/bin/python3 -m pytest -q {REPO}/tests/test_calc.py"
        return (await sandbox.exec(tests, cwd=REPO, env=SPEC.environment, timeout_s=30)).exit_code
    finally:
        await sandbox.kill()


async def verdict_on(provider: LocalProvider, task: Task, command: str, *, user: str = "root") -> Verdict:
    """The verdict after an agent has run `command` in the repository."""
    ref = await provider.create(SandboxSpec(image=task.image))
    sandbox = await provider.attach(ref)
    try:
        await prepare(task, sandbox)
        await sandbox.exec(command, cwd=REPO, user=user, timeout_s=30)
        return await evaluate(
            task, EvaluationRequest(key="1", task_id=task.id, sandbox=ref), PytestSandboxes(provider, sandbox)
        )
    finally:
        await sandbox.kill()
