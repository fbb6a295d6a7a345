"""Checks of one's own in real sandboxes: rewards that they bind, and pytest in them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.actors.evaluation.graders.checks import imports_only
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.evaluation.graders.history import task_files
from headrace.buffer.tasks.evaluators import CheckEvaluator, CompareEvaluator, PatchEvaluator, StateEvaluator
from headrace.buffer.tasks.parts import BinaryFile
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.launcher.commands import PRELOADED
from headrace.sandboxes.local.provider import LocalProvider
from support.clean_sandboxes import CleanSandboxes
from support.repositories import PYTEST, install_pytest

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
VENV = "/opt/venv"
PACKAGES = (
    f"""$(/usr/bin/python3 -c 'import sys; print("{VENV}/lib/python%d.%d/site-packages" % sys.version_info[:2])')"""
)
MAKE_BARE = f"""
mkdir -p {VENV}/bin && ln -s /usr/bin/python3 {VENV}/bin/python && echo 'home = /usr/bin' > {VENV}/pyvenv.cfg
"""
MAKE_VENV = f"""{MAKE_BARE}
folder={PACKAGES}
mkdir -p "$folder"
mv {PYTEST}/* "$folder"
"""


class ImageWithPytest(CleanSandboxes):
    """Clean sandboxes of an image with pytest in a virtual environment."""

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with super().clean(spec) as sandbox:
            await install_pytest(sandbox)
            made = await sandbox.exec(MAKE_VENV, cwd="/", timeout_s=20)
            assert made.exit_code == 0, made
            yield sandbox


async def verdict_on(
    provider: LocalProvider,
    check: str,
    command: str = "true",
    sandboxes: type = CleanSandboxes,
    binary_files: Mapping[str, BinaryFile] | None = None,
    kind: type[CheckEvaluator] = StateEvaluator,
    **evaluator: object,
) -> Verdict:
    """The verdict of a state check after an agent has run `command` in /workspace."""
    spec = kind(check=check, timeout_s=20.0, **evaluator)  # type: ignore[arg-type]
    files = {"/workspace/answer": "1\n"}
    task = Task(
        id=TaskId("own"),
        family="own",
        instruction="write 2",
        evaluator=spec,
        files=files,
        binary_files=binary_files or {},
    )
    ref = await provider.create(SandboxSpec(image=task.image))
    sandbox = await provider.attach(ref)
    try:
        await sandbox.write_many(await task_files(task))
        await sandbox.exec(command, cwd="/workspace", timeout_s=20)
        return await evaluate(
            task, EvaluationRequest(key="1", task_id=task.id, sandbox=ref), sandboxes(provider, sandbox)
        )
    finally:
        await sandbox.kill()


BOUND = {
    "reward = 0.1": (0.1, False),
    "reward = -1": (-1.0, False),
    "reward = 1": (1.0, True),
    "reward = 250": (250.0, True),
    "reward, solved = 0.7, True": (0.7, True),
    "reward, solved = 3, False": (3.0, False),
    "reward = True": (1.0, True),
    "import sys; reward = -0.5; sys.exit()": (-0.5, False),
    "import sys; reward, solved = 2, True; sys.exit(1)": (2.0, False),
    "import sys; solved = True; sys.exit(1)": (0.0, False),
    "import sys; print('Traceback', file=sys.stderr); sys.exit(1)": (0.0, False),
    "print('{\"reward\": 9}')": (1.0, True),
}


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/bin/python3"])
@pytest.mark.parametrize("check", BOUND)
async def test_a_check_sets_the_reward_and_whether_the_task_is_solved(
    provider: LocalProvider, check: str, python: str
) -> None:
    """Without an interpreter of its own, and in one that the task names."""
    verdict = await verdict_on(provider, check, python=python)
    assert (verdict.reward, verdict.solved) == BOUND[check], verdict
    assert verdict.cause is (Cause.SOLVED if verdict.solved else Cause.FAILED)


READ = "answer = open('/workspace/answer').read(); "


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "1e200", "10**400", "'much'", "None"])
async def test_a_reward_that_is_not_a_bounded_number_is_an_evaluator_error(provider: LocalProvider, value: str) -> None:
    """Also where it has a proper one for the untouched files."""
    check = f"{READ}reward = 0 if answer == '1\\n' else {value}"
    verdict = await verdict_on(provider, check, "echo 2 > answer")
    assert (verdict.reward, verdict.solved, verdict.cause) == (None, False, Cause.EVALUATOR)
    assert verdict.detail.startswith("evaluator error: the reward"), verdict


async def test_a_check_that_needs_more_than_the_preloaded_modules_gets_an_interpreter(provider: LocalProvider) -> None:
    late = "hashlib = sys.modules['builtins'].__import__('hashlib')"
    check = f"import sys; {late}; sys.exit(not hashlib.sha256(b'').hexdigest().startswith('e3b0'))"
    assert imports_only(check, PRELOADED)
    assert (await verdict_on(provider, check)).solved


async def test_a_check_that_raises_after_setting_a_reward_gives_no_reward(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, f"reward = 1; {READ}assert answer == '1\\n'", "echo 2 > answer")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID)


OLD_PYTHON = """\
#!/usr/bin/python3 -IS
import sys

del sys.argv[: sys.argv.index("-c")]
program = sys.argv.pop(1)
sys.version_info, sys.version = (3, 6, 15), "3.6.15 (default)"
if "\\nfrom __future__ import annotations" in program:
    sys.exit("SyntaxError: future feature annotations is not defined")
exec(program)
"""
INTERPRETERS = {
    "old": (OLD_PYTHON, "needs Python 3.7 or later, and this is 3.6.15"),
    "absent": (None, "No such file or directory"),
    "damaged": ("#!/bin/sh\necho Fatal Python error: init_fs_encoding >&2\nexit 1\n", "init_fs_encoding"),
    "nothing": ("#!/bin/sh\n", ""),
}


class ImageWithAnotherPython(CleanSandboxes):
    """Clean sandboxes of an image whose /opt/python3 is `text`."""

    text: str | None

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with super().clean(spec) as sandbox:
            if self.text is not None:
                await sandbox.write("/opt/python3", self.text.encode())
                await sandbox.exec("chmod 755 /opt/python3", timeout_s=20)
            yield sandbox


@pytest.mark.parametrize("name", INTERPRETERS)
@pytest.mark.parametrize("kind", [StateEvaluator, CompareEvaluator])
async def test_an_interpreter_that_cannot_run_the_check_is_an_evaluator_error(
    provider: LocalProvider, kind: type[CheckEvaluator], name: str
) -> None:
    """Python ends with 1 where it cannot start, and so does a failed check."""
    text, said = INTERPRETERS[name]
    sandboxes = type("CleanSandboxes", (ImageWithAnotherPython,), {"text": text})
    evaluator = {"kind": kind, "python": "/opt/python3"} | ({"expected": "1"} if kind is CompareEvaluator else {})
    verdict = await verdict_on(provider, "result = 1", "echo 2 > answer", sandboxes, **evaluator)
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR), verdict
    assert said in verdict.detail


PYTEST_CHECK = "import sys, pytest; sys.exit(pytest.main(['-q', '/tests/test_state.py']))"
STATE_TESTS = {
    "/tests/test_state.py": "from pathlib import Path\n\n\ndef test_answer():\n"
    "    assert Path('/workspace/answer').read_text() == '2\\n'\n"
}
WITH_PYTEST = {"hidden_files": STATE_TESTS, "python": f"{VENV}/bin/python"}
PASS_ALL = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
WRITE_IT = f"printf '%s' {shlex.quote(PASS_ALL)} > evil.py"
PLUGIN = """
mkdir evil-1.dist-info
printf 'Name: evil\\nVersion: 1\\n' > evil-1.dist-info/METADATA
printf '[pytest11]\\nevil = evil\\n' > evil-1.dist-info/entry_points.txt
"""
HIJACKS = {
    "conftest.py": f"{WRITE_IT}; cp evil.py conftest.py; mkdir /tests; mv evil.py /tests/conftest.py",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' | tee pytest.ini > /pytest.ini",
    "a plugin": f"{WRITE_IT}\n{PLUGIN}",
    "modules": "for name in pytest _pytest sitecustomize pluggy sys; do echo 'import os; os._exit(0)' > $name.py; done",
    "the interpreter": f"mkdir -p {VENV}/bin; ln -sf /bin/true {VENV}/bin/python",
}


async def test_a_state_check_may_use_pytest(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, PYTEST_CHECK, "echo 2 > answer", ImageWithPytest, **WITH_PYTEST)
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict
    verdict = await verdict_on(provider, PYTEST_CHECK, "true", ImageWithPytest, **WITH_PYTEST)
    assert (verdict.reward, verdict.cause, "1 failed" in verdict.detail) == (0.0, Cause.FAILED, True), verdict


@pytest.mark.parametrize("command", HIJACKS.values(), ids=HIJACKS)
async def test_files_left_by_the_agent_cannot_take_over_pytest(provider: LocalProvider, command: str) -> None:
    verdict = await verdict_on(provider, PYTEST_CHECK, command, ImageWithPytest, **WITH_PYTEST)
    assert (verdict.reward, verdict.cause, "1 failed" in verdict.detail) == (0.0, Cause.FAILED, True), verdict


class ImageWithBareVenv(CleanSandboxes):
    """Clean sandboxes of an image whose virtual environment keeps its packages where the agent may install others."""

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with super().clean(spec) as sandbox:
            made = await sandbox.exec(MAKE_BARE, cwd="/", timeout_s=20)
            assert made.exit_code == 0, made
            yield sandbox


async def test_packages_below_a_data_path_are_not_imported(provider: LocalProvider) -> None:
    planted = f"mkdir -p {PACKAGES}; cd {PACKAGES}; echo 'import os; os._exit(0)' | tee planted.py > planted.pth"
    check = "import sys, importlib.util; sys.exit(importlib.util.find_spec('planted') is None)"
    bare = {"python": f"{VENV}/bin/python", "data_paths": (f"{VENV}/lib",)}
    verdict = await verdict_on(provider, check, planted, ImageWithBareVenv, **bare)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict


@pytest.mark.parametrize("kind", [PatchEvaluator, CompareEvaluator])
async def test_files_that_are_not_text_are_kept_and_belong_to_no_patch(
    provider: LocalProvider, tmp_path: Path, kind: type[CheckEvaluator]
) -> None:
    content = b"\x89PNG\r\n\0\xff"
    (tmp_path / "image.png").write_bytes(content)
    image = BinaryFile(file=str(tmp_path / "image.png"), sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    look = (
        f"import os; found = [open('/workspace/answer').read(), open('/workspace/image.png', 'rb').read() == {content}"
    )
    look += ", sorted(os.listdir('/workspace'))]\n"
    right = ["2\n", True, ["answer", "image.png"]]
    if kind is PatchEvaluator:
        evaluator = {"check": f"{look}raise SystemExit(found != {right})"}
    else:
        evaluator = {"check": f"{look}result = found", "expected": json.dumps(right)}

    async def verdict_after(command: str) -> Verdict:
        return await verdict_on(
            provider, command=command, kind=kind, binary_files={"/workspace/image.png": image}, **evaluator
        )

    mended = await verdict_after("echo 2 > answer")
    assert (mended.reward, mended.detail) == (1.0, ""), mended
    assert (await verdict_after("true")).cause is Cause.FAILED
    other = await verdict_after("echo 2 > answer; echo > image.png; printf '\\xff' > made; rm image.png")
    assert (other.reward, other.detail) == (1.0, "dropped from the patch: /workspace/made (binary)"), other
    spoiled = await verdict_after("printf '\\xff' > answer; printf '\\xff' > image.png")
    assert spoiled.cause is Cause.FAILED, spoiled
    assert "/workspace/answer (binary), /workspace/image.png (binary)" in spoiled.detail
