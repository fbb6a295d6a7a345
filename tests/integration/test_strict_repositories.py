"""Repositories whose own settings turn warnings into errors, graded by test ids, by a command and by a script.

The slow tests download releases of projects that have such settings: blinker 1.9.0, itsdangerous 2.2.0, flask 3.1.3 and
pytest 8.4.2.
"""

from __future__ import annotations

import hashlib
import itertools
import shlex
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.parts import BinaryFile
from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, Grader, RepositorySpec, TestIds
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes.local.provider import LocalProvider
from support.repositories import COMMIT, FILES, HIDDEN_TESTS, IDS, REPO, RIGHT, SPEC, repository_task, verdict_on

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
SOLVE = f"printf '%s' {shlex.quote(RIGHT)} > calc.py"
WRONG = "echo '# still wrong' >> calc.py"
XFAIL = "printf 'import pytest\\ndef mean(numbers): pytest.xfail()\\nlast = mean\\n' > calc.py"
MAIN = "\nif __name__ == '__main__':\n    import sys, pytest\n    sys.exit(pytest.main(['-qWerror', __file__]))\n"
GRADERS = {
    "test_ids": IDS,
    "eval_cmd": EvalCommand(command="python3 -m pytest -q tests/test_calc.py"),
    "script": EvalScript(script=HIDDEN_TESTS + MAIN),
}
STRICT = {
    "pytest.ini": ("pytest.ini", "[pytest]\nfilterwarnings = error\n"),
    "pyproject.toml": ("pyproject.toml", '[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n'),
    "setup.cfg": ("setup.cfg", "[tool:pytest]\nfilterwarnings = error\n"),
    "tox.ini": ("tox.ini", "[pytest]\nfilterwarnings = error\n"),
    "addopts": ("pytest.ini", "[pytest]\naddopts = -W error --strict-config --strict-markers\nxfail_strict = true\n"),
    "environment": ("setup.cfg", "[metadata]\n"),
}


def strict_task(strict: str, grader: str) -> Task:
    name, text = STRICT[strict]
    # A pytest.ini would take precedence over the settings to test.
    files = {path: content for path, content in FILES.items() if not path.endswith("pyproject.toml")}
    environment = {**SPEC.environment, **({"PYTHONWARNINGS": "error"} if strict == "environment" else {})}
    spec = replace(SPEC, grader=GRADERS[grader], prepare=(COMMIT,), environment=environment)
    task = repository_task(spec) if grader != "script" else repository_task(spec, hidden_files={})
    return replace(task, files={**files, f"{REPO}/{name}": text})


DEFAULT = {("pytest.ini", "test_ids"), ("addopts", "eval_cmd"), ("environment", "script")}


@pytest.mark.parametrize(
    ("strict", "grader"),
    [
        pytest.param(*pair, marks=[] if pair in DEFAULT else pytest.mark.slow)
        for pair in itertools.product(STRICT, GRADERS)
    ],
)
async def test_a_repository_with_warnings_as_errors_is_graded(
    provider: LocalProvider, strict: str, grader: str
) -> None:
    task = strict_task(strict, grader)
    right = await verdict_on(provider, task, SOLVE)
    assert (right.reward, right.detail) == (1.0, ""), right
    for command in (WRONG, XFAIL):
        verdict = await verdict_on(provider, task, command)
        assert verdict.reward == 0.0, verdict


@dataclass(frozen=True, kw_only=True)
class Release:
    """Release of a project on PyPI, with one line of it that a task takes away."""

    name: str
    version: str
    needs: tuple[str, ...]
    path: str
    right: str
    wrong: str
    tests: str
    fail_to_pass: str
    pass_to_pass: str

    @property
    def grading(self) -> dict[str, Grader]:
        options = ["-q", "-c", f"{REPO}/pyproject.toml", "--rootdir", REPO]
        script = f"import sys, pytest\nsys.exit(pytest.main([*{options}, '{REPO}/{self.tests}']))\n"
        ids = [f"{self.tests}::{name}" for name in (self.fail_to_pass, self.pass_to_pass)]
        return {
            "test_ids": TestIds(fail_to_pass=(ids[0],), pass_to_pass=(ids[1],)),
            "eval_cmd": EvalCommand(command=f"python3 -m pytest -q {self.tests}"),
            "script": EvalScript(script=script),
        }


RELEASES = (
    Release(
        name="blinker",
        version="1.9.0",
        needs=("pytest==9.1.1", "pytest-asyncio"),
        path="src/blinker/_utilities.py",
        right="        return self.name\n",
        wrong="        return self.name.upper()\n",
        tests="tests/test_symbol.py",
        fail_to_pass="test_symbols",
        pass_to_pass="test_pickled_symbols",
    ),
    Release(
        name="itsdangerous",
        version="2.2.0",
        needs=("pytest==9.1.1", "freezegun"),
        path="src/itsdangerous/encoding.py",
        right='    return _int_to_bytes(num).lstrip(b"\\x00")\n',
        wrong="    return _int_to_bytes(num)\n",
        tests="tests/test_itsdangerous/test_encoding.py",
        fail_to_pass="test_int_bytes[192-\\xc0]",
        pass_to_pass="test_base64_bad",
    ),
    Release(
        name="flask",
        version="3.1.3",
        # Its conftest.py uses a name that pytest 9 no longer has.
        needs=("pytest==8.3.5", "werkzeug", "jinja2", "click", "itsdangerous", "blinker", "asgiref"),
        path="src/flask/helpers.py",
        right='    return bool(val and val.lower() not in {"0", "false", "no"})\n',
        wrong="    return bool(val)\n",
        tests="tests/test_helpers.py",
        fail_to_pass="TestHelpers::test_get_debug_flag[No-False]",
        pass_to_pass="TestHelpers::test_get_debug_flag[True-True]",
    ),
    Release(
        name="pytest",
        version="8.4.2",
        needs=("pytest==8.4.2", "attrs"),
        path="src/_pytest/mark/expression.py",
        right="        ret: ast.expr = ast.Constant(False)\n",
        wrong="        ret: ast.expr = ast.Constant(True)\n",
        tests="testing/test_mark_expression.py",
        fail_to_pass="test_empty_is_false",
        pass_to_pass="test_basic[not true-False]",
    ),
)


def release_task(release: Release, folder: Path) -> Task:
    """Download a release and what its tests need, and take the right line away. Skips the test if pip cannot."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = ["download", "--no-binary", ":all:", "--no-deps", f"{release.name}=={release.version}", "-d", folder]
    for command in (source, ["install", "--target", folder / "site", *release.needs]):
        ran = subprocess.run([*pip, *command], capture_output=True, text=True, timeout=600, check=False)
        if ran.returncode:
            pytest.skip(f"pip {command[0]} failed: {ran.stderr[-300:]}")
    # The packages are read by another user in the sandbox.
    packages = folder / "site.tar"
    with tarfile.open(packages, "w") as archive:
        archive.add(folder / "site", arcname="site", filter=readable)
    files: dict[str, str] = {}
    with tarfile.open(folder / f"{release.name}-{release.version}.tar.gz") as archive:
        for member in filter(tarfile.TarInfo.isreg, archive):
            text = archive.extractfile(member).read().decode(errors="replace")  # type: ignore[union-attr]
            files[f"{REPO}/{member.name.partition('/')[2]}"] = text
    assert files[f"{REPO}/{release.path}"].count(release.right) == 1
    files[f"{REPO}/{release.path}"] = files[f"{REPO}/{release.path}"].replace(release.right, release.wrong)
    content = packages.read_bytes()
    binary = BinaryFile(file=str(packages), sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    spec = RepositorySpec(
        workdir=REPO,
        grader=release.grading["test_ids"],
        prepare=("tar -xf /opt/site.tar -C /opt", COMMIT),
        environment={"PYTHONPATH": f"{REPO}/src:/opt/site"},
    )
    return Task(
        id=TaskId(release.name),
        family="releases",
        instruction="",
        files=files,
        binary_files={"/opt/site.tar": binary},
        evaluator=RepositoryEvaluator(repository=spec, timeout_s=60.0),
    )


def readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode |= 0o755 if member.isdir() else 0o644
    return member


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: f"{release.name}-{release.version}")
async def test_a_strict_release_is_graded(provider: LocalProvider, release: Release, tmp_path: Path) -> None:
    task = release_task(release, tmp_path)
    text = task.files[f"{REPO}/{release.path}"]
    indent = " " * (len(release.right) - len(release.right.lstrip()))
    patches = {
        "right": (release.right, 1.0),
        "wrong": (f"{indent}# still wrong\n{release.wrong}", 0.0),
        "xfail": (f"{indent}import pytest; pytest.xfail()\n{release.wrong}", 0.0),
    }
    rewards: dict[str, dict[str, float | None]] = {}
    for grader, given in release.grading.items():
        spec = replace(task.evaluator.repository, grader=given)  # type: ignore[type-var]
        graded = replace(task, evaluator=replace(task.evaluator, repository=spec))
        rewards[grader] = {}
        for name, (line, _) in patches.items():
            command = f"printf '%s' {shlex.quote(text.replace(release.wrong, line))} > {release.path}"
            verdict = await verdict_on(provider, graded, command)
            rewards[grader][name] = verdict.reward
    assert rewards == {grader: {name: reward for name, (_, reward) in patches.items()} for grader in release.grading}
