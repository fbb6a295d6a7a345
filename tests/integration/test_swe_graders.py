"""The graders of SWE rows (f2p_script, eval_cmd, swepro) on a small repository, in real sandboxes."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, Swepro
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.local.provider import LocalProvider
from support.repositories import COMMIT, HIDDEN_TESTS, RIGHT, SPEC, WRONG, repository_task, verdict_on

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
SOLVE = f"printf '%s' {shlex.quote(RIGHT)} > calc.py"

MAIN = "\nif __name__ == '__main__':\n    import sys, pytest\n    sys.exit(pytest.main(['-q', '-x', __file__]))\n"
F2P = HIDDEN_TESTS + MAIN
# The tests are in a later commit of the image, as in SWE-bench Pro.
GOLD_TESTS = (
    f"{COMMIT}; printf '%s' {shlex.quote(HIDDEN_TESTS)} > tests/test_calc.py; "
    "git -c user.name=a -c user.email=a@example.invalid commit -qam tests; git tag gold; git reset -q --hard HEAD~1"
)
RUN = "#!/bin/bash\nset -e\nfor file in ${1//,/ }; do python3 -m pytest -v -p no:cacheprovider $file; done\n"
PARSER = """
import json, re, sys
tests = []
for line in open(sys.argv[1]):
    match = re.match(r"(\\S+::\\S+) (PASSED|FAILED|SKIPPED)", line)
    if match:
        tests.append({"name": match[1], "status": match[2]})
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""
SWEPRO = Swepro(
    run_script=RUN,
    parser_script=PARSER,
    before_repo_set_cmd="git reset -q --hard HEAD\ngit checkout gold -- tests/test_calc.py",
    selected_test_files=("tests/test_calc.py",),
    fail_to_pass=("tests/test_calc.py::test_mean_of_nothing",),
    pass_to_pass=("tests/test_calc.py::test_mean", "tests/test_calc.py::test_last"),
)
TASKS = {
    "f2p_script": repository_task(replace(SPEC, grader=EvalScript(script=F2P)), hidden_files={}),
    "eval_cmd": repository_task(replace(SPEC, grader=EvalCommand(command="python3 -m pytest -q tests/test_calc.py"))),
    "two commands": repository_task(
        replace(
            SPEC,
            grader=EvalCommand(command="python3 -m pytest -xq tests -k mean && python3 -m pytest -q tests -k last"),
        )
    ),
    "swepro": repository_task(replace(SPEC, grader=SWEPRO, prepare=(GOLD_TESTS,)), hidden_files={}),
}
# What is printed, reported by another process, ended early, skipped or claimed.
PRINTED = "\\n".join(f"{name} PASSED" for name in (*SWEPRO.fail_to_pass, *SWEPRO.pass_to_pass))
CHEATS = {
    "nothing": "true",
    "leaves": "echo 'import os; os._exit(0)' > calc.py",
    "prints and leaves": f"printf 'import os\\nos.write(1, b\"{PRINTED}\")\\nos._exit(0)\\n' > calc.py",
    "skips": "echo 'import pytest; pytest.skip(allow_module_level=True)' > calc.py",
    "skips when called": "printf 'import pytest\\nlast = max\\ndef mean(numbers): pytest.skip()\\n' > calc.py",
    "patches": "printf 'from _pytest.python import Function\\nFunction.runtest = lambda self: None\\n' >> calc.py",
    "collects only": "printf '[pytest]\\naddopts = --co\\n' > pytest.ini",
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_a_correct_patch_solves_the_task(provider: LocalProvider, task: object) -> None:
    verdict = await verdict_on(provider, task, SOLVE)
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict


GRADERS = ("f2p_script", "eval_cmd", "swepro")
EACH_CHEAT_ONCE = {(GRADERS[place % 3], name) for place, name in enumerate(CHEATS)}


@pytest.mark.parametrize(
    ("name", "cheat"),
    [
        pytest.param(
            name, command, id=f"{name}-{cheat}", marks=[] if (name, cheat) in EACH_CHEAT_ONCE else pytest.mark.slow
        )
        for name in GRADERS
        for cheat, command in CHEATS.items()
    ],
)
async def test_a_cheat_earns_no_reward(provider: LocalProvider, name: str, cheat: str) -> None:
    verdict = await verdict_on(provider, TASKS[name], cheat)
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict


BUILDS_FIRST = f"#!/bin/bash\npython3 -c 'import calc'\n{RUN.partition('set -e')[2]}"
ENDS_THE_SCRIPT = f"import os, signal\nos.write(1, b'{PRINTED}\\n')\nos.kill(os.getppid(), signal.SIGKILL)\n"
DROPS_A_TEST = f"""{WRONG}
import atexit, os
import _pytest.python as python
collect = python.PyCollector.collect
python.PyCollector.collect = lambda self: [item for item in collect(self) if "nothing" not in item.name]
atexit.register(os.write, 1, b"{PRINTED}\\n")
"""
UNITTEST = """#!/bin/bash
python3 - <<'END'
from calc import mean
print("tests/test_calc.py::test_mean PASSED")
print("tests/test_calc.py::test_last PASSED")
print("tests/test_calc.py::test_mean_of_nothing", "PASSED" if mean([]) == 0.0 else "FAILED")
END
"""


def swepro_task(run_script: str) -> Task:
    grader = replace(SWEPRO, run_script=run_script)
    return repository_task(replace(SPEC, grader=grader, prepare=(GOLD_TESTS,)), hidden_files={})


def write(text: str) -> str:
    return f"printf '%s' {shlex.quote(text)} > calc.py"


@pytest.mark.parametrize(
    ("run_script", "cheat", "said"),
    [
        (BUILDS_FIRST, ENDS_THE_SCRIPT, "no pytest session started, although one does in the untouched repository"),
        (RUN, DROPS_A_TEST, "in the log, but not run by pytest: tests/test_calc.py::test_mean_of_nothing"),
    ],
    ids=["ends-the-script", "drops-a-test"],
)
async def test_a_log_does_not_count_where_pytest_should_have_run(
    provider: LocalProvider, run_script: str, cheat: str, said: str
) -> None:
    task = swepro_task(run_script)
    assert (await verdict_on(provider, task, SOLVE)).reward == 1.0
    verdict = await verdict_on(provider, task, write(cheat))
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict
    assert said in verdict.detail


async def test_a_log_without_pytest_can_be_forged_and_the_verdict_says_so(provider: LocalProvider) -> None:
    """Known to be open (docs/attacks.md)."""
    task = swepro_task(UNITTEST)
    assert (await verdict_on(provider, task, "true")).reward == 0.0
    for command in (SOLVE, write(f"print({PRINTED.encode().decode('unicode_escape')!r})\nraise SystemExit\n")):
        verdict = await verdict_on(provider, task, command)
        assert verdict.reward == 1.0, verdict
        assert verdict.detail.startswith("by the log alone, which the code under test can forge: tests/test_calc.py")


async def test_a_test_also_skipped_in_the_untouched_repository_is_not_blamed_on_the_patch(
    provider: LocalProvider,
) -> None:
    skipping = HIDDEN_TESTS + "\n\ndef test_elsewhere():\n    import pytest\n    pytest.skip('not on this machine')\n"
    task = repository_task(
        replace(SPEC, grader=EvalScript(script=F2P.replace(HIDDEN_TESTS, skipping))), hidden_files={}
    )
    assert (await verdict_on(provider, task, SOLVE)).reward == 1.0


RUN_SCRIPT_FILE = "echo 'python3 -m pytest -q tests' > run.sh"
AFTERWARDS = "python3 -c 'from calc import mean; assert mean([]) == 0.0'"


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (f"python3 -m pytest -q tests -k last && {AFTERWARDS}", ""),
        (AFTERWARDS, "by the exit code alone: the command runs no pytest"),
    ],
    ids=["after pytest", "without pytest"],
)
async def test_a_command_decides_by_its_exit_code_too(provider: LocalProvider, command: str, note: str) -> None:
    task = repository_task(replace(SPEC, grader=EvalCommand(command=command)))
    untouched = await verdict_on(provider, task, "true")
    assert (untouched.reward, "exit code 1" in untouched.detail) == (0.0, True), untouched
    verdict = await verdict_on(provider, task, SOLVE)
    assert (verdict.reward, verdict.detail) == (1.0, note), verdict


async def test_a_patch_that_keeps_a_command_from_pytest_fails(provider: LocalProvider) -> None:
    task = repository_task(
        replace(SPEC, grader=EvalCommand(command="sh run.sh"), prepare=(RUN_SCRIPT_FILE, *SPEC.prepare))
    )
    assert (await verdict_on(provider, task, SOLVE)).reward == 1.0
    verdict = await verdict_on(provider, task, "echo true > run.sh")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


@pytest.mark.parametrize(
    "parser",
    [
        "import sys; sys.exit(1)",
        pytest.param("pass", marks=pytest.mark.slow),
        pytest.param("open(__import__('sys').argv[3], 'w').write('[]')", marks=pytest.mark.slow),
    ],
)
async def test_a_crashing_parser_is_an_evaluator_error(provider: LocalProvider, parser: str) -> None:
    spec = replace(SPEC, grader=replace(SWEPRO, parser_script=parser), prepare=(GOLD_TESTS,))
    assert (await verdict_on(provider, repository_task(spec, hidden_files={}), SOLVE)).cause is Cause.EVALUATOR


async def test_a_patch_to_a_file_changed_by_the_setup_is_dropped(provider: LocalProvider) -> None:
    spec = replace(SPEC, grader=replace(SWEPRO, selected_test_files=("spec/any",)), prepare=(GOLD_TESTS,))
    moved = replace(spec.grader, before_repo_set_cmd="echo 'def mean(_): return 9' > calc.py", run_script="exit 0")
    verdict = await verdict_on(provider, repository_task(replace(spec, grader=moved), hidden_files={}), SOLVE)
    assert (verdict.reward, "calc.py (test file)" in verdict.detail) == (0.0, True), verdict
