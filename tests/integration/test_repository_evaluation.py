"""Patches to a repository, scored in real sandboxes with a real git and a real pytest."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from headrace.actors.evaluation.graders.history import prepare
from headrace.buffer.tasks.repositories import EvalCommand, TestIds
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider
from support.repositories import (
    COMMIT,
    HIDDEN_TESTS,
    IDS,
    REPO,
    RIGHT,
    SPEC,
    exit_code_of_tests,
    repository_task,
    verdict_on,
)

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
SOLVE = f"printf '%s' {shlex.quote(RIGHT)} > calc.py"


CHECK = {"check": "from calc import mean; result = [mean([]), mean([1, 3])]", "expected": "[0.0, 2.0]"}
REPORT_HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
PATCHED = "from _pytest.python import Function\nFunction.runtest = lambda self: None\n"
EQUAL = """
class Any(float):
    __eq__ = lambda *_: True
    __hash__ = None
def mean(numbers): return Any()
def last(numbers): return Any()
"""
SKIP = "import pytest\ndef mean(numbers): pytest.skip()\nlast = mean\n"
XFAIL = "import pytest\ndef mean(numbers): pytest.xfail()\nlast = mean\n"
XFAILED = "from _pytest.outcomes import XFailed\ndef mean(numbers): raise XFailed('x')\nlast = mean\n"
FORGETFUL = """
from _pytest.runner import CallInfo
call = CallInfo.from_call.__func__
def from_call(*arguments, **named):
    info = call(*arguments, **named)
    if info.excinfo is not None and isinstance(info.excinfo.value, ZeroDivisionError):
        info.excinfo, info._result = None, None
    return info
CallInfo.from_call = classmethod(from_call)
"""
CHEATS = {
    "pytest.xfail": f"printf '%s' {shlex.quote(XFAIL)} > calc.py",
    "raised XFailed": f"printf '%s' {shlex.quote(XFAILED)} > calc.py",
    "forgetful CallInfo": f"printf '%s' {shlex.quote(FORGETFUL)} >> calc.py",
    "conftest makereport hook": f"printf '%s' {shlex.quote(REPORT_HOOK)} > conftest.py; cp conftest.py tests/",
    "os._exit(0) at import": "echo 'import os; os._exit(0)' > calc.py",
    "pytest.skip": f"printf '%s' {shlex.quote(SKIP)} > calc.py",
    "pytest.ini addopts=--co": "printf '[pytest]\naddopts = --co\n' > pytest.ini",
    "patched Function.runtest": f"printf '%s' {shlex.quote(PATCHED)} >> calc.py",
    "__eq__ always true": f"printf '%s' {shlex.quote(EQUAL)} > calc.py",
}


@pytest.mark.whole(but_first=True)
@pytest.mark.core
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
async def test_a_cheat_in_the_diff_that_fools_exit_codes_earns_no_reward(provider: LocalProvider, cheat: str) -> None:
    task = repository_task(**CHECK) if cheat == CHEATS["__eq__ always true"] else repository_task()
    assert await exit_code_of_tests(provider, task, cheat) == 0
    verdict = await verdict_on(provider, task, cheat)
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict
    dropped = [name for name in ("conftest.py", "pytest.ini") if name in cheat]
    assert not [name for name in dropped if f"{name} (test setting)" not in verdict.detail], verdict


async def test_doing_nothing_fails_the_task(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, repository_task(), "true")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict
    assert "1 of 3 tests did not pass: tests/test_calc.py::test_mean_of_nothing" in verdict.detail


FORGED = """
import json, os, re, socket, sys
if not os.fork():
    os.setsid()
    for process in os.listdir("/proc"):
        try:
            for name in os.listdir(f"/proc/{process}/fd"):
                if os.readlink(f"/proc/{process}/fd/{name}").startswith(("socket:", "pipe:")):
                    with open(f"/proc/{process}/fd/{name}", "w") as file:
                        file.write(json.dumps({"event": "test", "id": TEST, "result": "passed"}) + "\\n")
        except OSError:
            pass
    for folder in ("/tmp", "/opt", "/logs/verifier", "/workspace/calc", "/home/agent"):
        try:
            os.makedirs(folder, exist_ok=True)
            for name in ("reward.txt", "report.json", "junit.xml", "result.json", ".report.json"):
                with open(f"{folder}/{name}", "w") as file:
                    file.write("1.0")
        except OSError:
            pass
    while True:
        pass
for descriptor in map(int, os.listdir("/proc/self/fd")):
    try:
        os.write(descriptor, (json.dumps({"event": "test", "id": TEST, "result": "passed"}) + "\\n").encode())
    except OSError:
        pass
def mean(numbers): return 1.0
def last(numbers): return numbers[-1]
""".replace("TEST", "'tests/test_calc.py::test_mean_of_nothing'")
SECOND_SESSION = """
import json, os, socket, sys
def forge():
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            channel = socket.socket(fileno=os.dup(descriptor))
            channel.sendall(b'{"event": "start"}\\n')
            key, good, bad, *_ = json.loads(channel.makefile("rb").readline())
        except (OSError, ValueError):
            continue
        names = ("mean", "last", "mean_of_nothing")
        records = [("test", f"tests/test_calc.py::test_{name}", "passed") for name in names]
        records += [("test", f"x::test_{good}", "passed"), ("test", f"x::test_{bad}", "failed"), ("end", "", "")]
        for event, test, result in records:
            channel.sendall(json.dumps({"event": event, "id": test, "result": result, "key": key}).encode() + b"\\n")
        os._exit(0)
forge()
"""
SHADOW = "import sys, os\nprint('3 passed')\nos._exit(0)\n"
TAMPERED = """
mkdir -p /root/bin
for tool in git python3 pytest bash; do
  for folder in /usr/local/bin /root/bin /workspace/calc; do
    printf '#!/bin/sh\\nexit 0\\n' > $folder/$tool
    chmod 755 $folder/$tool
  done
done 2> /dev/null
echo 'exit 0' | tee /root/.bashrc /home/agent/.bashrc /etc/profile /root/.bash_profile > /dev/null
echo /workspace/x.so > /etc/ld.so.preload
"""
UNSOLVED = {
    "forged by file and by daemon": f"printf '%s' {shlex.quote(FORGED)} > calc.py",
    "a session of its own": f"printf '%s' {shlex.quote(SECOND_SESSION)} > calc.py",
    "planted rewards": "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.txt reward.txt result.json",
    "tools": TAMPERED,
    "shadowed pytest": f"for m in pytest _pytest pluggy py p; do printf '%s' {shlex.quote(SHADOW)} > $m.py; done",
    "startup": f"printf '%s' {shlex.quote(SHADOW)} | tee sitecustomize.py usercustomize.py; echo 'import os' > x.pth",
    "skip at import": "echo 'import pytest; pytest.skip(allow_module_level=True)' > calc.py",
    "skips of unittest": "echo 'import unittest; raise unittest.SkipTest' > calc.py",
    "tests rewritten": "rm -rf tests; mkdir tests; echo 'def test_mean_of_nothing(): pass' > tests/test_calc.py",
    "tests are a link": "mv tests t; ln -s t tests",
    "tests are a file": "rm -rf tests; echo > tests",
    "code is a link": "mv calc.py /tmp/calc.py; ln -s /tmp/calc.py calc.py",
    "code is gone": "rm calc.py",
    "a pipe": "rm calc.py; mkfifo calc.py",
    "empties tests at run time": 'echo \'open("tests/test_calc.py", "w")\' >> calc.py',
    "moves tests at run time": 'echo \'import os; os.rename("tests", "t")\' >> calc.py',
    "kills everything": "echo 'import os; os.kill(-1, 9)' > calc.py",
    "git turned hostile": "rm -rf .git; mkdir .git; echo ref: refs/heads/x > .git/HEAD; mkfifo .git/config",
    "repository gone": "cd /; rm -rf /workspace/calc",
}


KIN = ("skip at import", "skips of unittest", "tests are a link", "tests are a file", "code is gone", "a pipe")
"""Much like others of the list: run with the slow ones."""


@pytest.mark.parametrize(
    "command",
    [pytest.param(text, id=name, marks=pytest.mark.slow if name in KIN else []) for name, text in UNSOLVED.items()],
)
async def test_cheating_neither_earns_a_reward_nor_avoids_a_zero(provider: LocalProvider, command: str) -> None:
    verdict = await verdict_on(provider, repository_task(), command)
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict


@pytest.mark.slow
async def test_tests_that_hang_because_of_the_patch_are_blamed_on_the_patch(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, repository_task(timeout_s=10.0), "echo 'while True: pass' > calc.py")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


WAITING = """

def test_mean_of_nothing():
    while True:
        try:
            assert mean([]) == 0.0
        except ZeroDivisionError:
            continue
        return
"""


async def test_a_hang_that_the_patch_should_mend_is_a_failure_where_it_is_left(provider: LocalProvider) -> None:
    """The untouched repository hangs in the same test, which says nothing about the host."""
    hidden = {
        f"{REPO}/tests/test_calc.py": HIDDEN_TESTS[: HIDDEN_TESTS.index("\n\ndef test_mean_of_nothing")] + WAITING
    }
    task = repository_task(hidden_files=hidden, timeout_s=10.0)
    assert (await verdict_on(provider, task, SOLVE)).reward == 1.0
    verdict = await verdict_on(provider, task, "echo >> calc.py")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict
    assert verdict.detail.startswith("the tests exceeded timeout_s=10 where those of the untouched repository do")


HOSTILE_GIT = """
run=/workspace/run; printf '#!/bin/sh\\nexit 1\\n' > $run; chmod 755 $run
for key in core.fsmonitor diff.external core.pager filter.evil.clean filter.evil.smudge diff.evil.textconv; do
  git config $key $run
done
echo '* filter=evil diff=evil -text' > .gitattributes; echo '*' > .gitignore
mkdir -p .git/hooks; cp $run .git/hooks/pre-commit; echo /nonexistent > .git/objects/info/alternates
git init -q nested; echo x > nested/x.txt
printf 'x\\0y' > data.bin; truncate -s 30M large.txt; ln -s /etc/passwd link; ln -s calc.py inner
mkdir -p __pycache__ 'a b'; echo x > __pycache__/c.pyc; echo 'value = 1' > 'a b/ü.py'; chmod +x pyproject.toml
git commit -qam x 2> /dev/null; git update-index --assume-unchanged calc.py 2> /dev/null
"""
ODD = r"""
touch $'x\r' $'\r' $'t\t' $'n\n.py'; mkdir -p $'build\r'; echo x > $'build\r/a.txt'; echo x > '"q.py'
echo x > $'caf\xe9.py'; echo x > 'back\slash'; echo x > ' ends '; echo x > "$(printf 'n%.0s' {1..255})"
"""
GIT_NAMES = """
for name in .GIT '.git ' .git. '.git::$INDEX_ALLOCATION' git~1; do mkdir "$name"; echo x > "$name/x.py"; done
"""
DEEP = "python3 -c \"import os\nfor _ in range(1950): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('x')\""
UNUSUAL = {
    "control characters": (ODD, ("x\\r (unsafe path)", "build\\r/a.txt (unsafe path)", "n\\n.py (unsafe path)")),
    "names of git": (GIT_NAMES, (".GIT/x.py (belongs to git)", ".git /x.py (belongs to git)")),
    "a pattern of git": ("echo x > ':!a'; truncate -s 2M y.log", ()),
    "deep folders": (DEEP, ("d/d/d/d",)),
}


@pytest.mark.parametrize(("left", "recorded"), UNUSUAL.values(), ids=UNUSUAL)
async def test_unusual_names_neither_spoil_a_solution_nor_excuse_a_failure(
    provider: LocalProvider, left: str, recorded: tuple[str, ...]
) -> None:
    task = repository_task(replace(SPEC, prepare=(f"echo '*.log' > .gitignore; {COMMIT}",)))
    for command, reward in ((left, 0.0), (f"{SOLVE}\n{left}", 1.0)):
        verdict = await verdict_on(provider, task, command)
        assert verdict.reward == reward, verdict
        assert not [record for record in recorded if record not in verdict.detail], verdict
        assert "y.log" not in verdict.detail


BREAKS_ON = """#!/bin/sh
test -e {folder}/poison && exit 9
exec /usr/bin/python3 "$@"
"""


async def test_only_the_agents_files_break_the_collection_of_the_patch(provider: LocalProvider) -> None:
    for folder, reward in (("/tmp/left-by-the-agent", 0.0), ("/opt", None)):
        wrapper = shlex.quote(BREAKS_ON.format(folder=folder))
        prepare = (f"printf '%s' {wrapper} > /opt/python; chmod +x /opt/python; touch /opt/poison", COMMIT)
        task = repository_task(replace(SPEC, python="/opt/python", prepare=prepare))
        verdict = await verdict_on(provider, task, f"{SOLVE}; touch poison")
        assert verdict.reward == reward, verdict
        assert "collecting the diff failed with exit code 9" in verdict.detail


RECORDED = (
    "data.bin (binary)", "large.txt (over the size cap)", "link (symbolic link)", "inner (symbolic link)",
    ".gitattributes (belongs to git)",
)  # fmt: skip


@pytest.mark.core
async def test_a_correct_patch_is_rewarded_and_leftover_files_are_recorded(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, repository_task(), f"{SOLVE}\n{HOSTILE_GIT}")
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict
    assert not [record for record in RECORDED if record not in verdict.detail], verdict
    assert "pycache" not in verdict.detail


async def test_the_comparison_alone_can_reject_a_patch(provider: LocalProvider) -> None:
    assert (await verdict_on(provider, repository_task(**CHECK), SOLVE)).reward == 1.0
    verdict = await verdict_on(provider, repository_task(**CHECK), "true")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED)
    assert "ZeroDivisionError" in verdict.detail


async def test_tests_and_hidden_files_are_added_after_the_agent_is_killed(provider: LocalProvider) -> None:
    look = (
        "grep -rl 'test_mean_of_nothing' / --include=* -s --exclude-dir=proc --exclude-dir=usr && touch calc.py.found"
    )
    task = repository_task()
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    try:
        await prepare(task, sandbox)
        assert (await sandbox.exec(look, cwd="/", timeout_s=30)).exit_code == 1
    finally:
        await sandbox.kill()


async def test_tests_failing_on_the_untouched_repository_are_an_evaluator_error(provider: LocalProvider) -> None:
    for spec in (
        replace(SPEC, python="/usr/bin/false"),
        replace(SPEC, environment={}),
    ):
        verdict = await verdict_on(provider, repository_task(spec), SOLVE)
        assert verdict.reward is None, verdict
        assert verdict.cause in (Cause.EVALUATOR, Cause.INFRA)


async def test_the_user_of_the_tests_is_created_where_the_image_lacks_it(provider: LocalProvider) -> None:
    commit = SPEC.prepare[0].replace("agent:agent", "tester:tester")
    task = repository_task(replace(SPEC, user="tester", prepare=(commit,)))
    assert (await verdict_on(provider, task, SOLVE)).reward == 1.0


async def test_tests_may_close_all_low_descriptors(provider: LocalProvider) -> None:
    closing = f"import os\n\n\ndef test_clean():\n    os.closerange(3, 64)\n\n\n{HIDDEN_TESTS}"
    grader = replace(IDS, pass_to_pass=("tests/test_calc.py::test_clean", *IDS.pass_to_pass))
    # Without capture, whose descriptors are low ones too.
    spec = replace(SPEC, grader=grader, environment={**SPEC.environment, "PYTEST_ADDOPTS": "-s"})
    task = repository_task(spec, hidden_files={f"{REPO}/tests/test_calc.py": closing})
    assert (await verdict_on(provider, task, SOLVE)).reward == 1.0


NAMED = """
printf 'def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0.0\n' > unit_test.py
printf 'from unit_test import mean\n\n\ndef last(numbers):\n    return numbers[-1]\n' > calc.py
echo 'raise SystemExit("not to be collected")' > test_scratch.py
"""


@pytest.mark.parametrize("grader", [IDS, EvalCommand(command="python3 -m pytest -q")], ids=["ids", "command"])
async def test_a_new_file_may_have_the_name_of_a_test(provider: LocalProvider, grader: TestIds | EvalCommand) -> None:
    verdict = await verdict_on(provider, repository_task(replace(SPEC, grader=grader)), NAMED)
    assert verdict.reward == 1.0, verdict


async def test_a_repository_may_have_modules_named_like_those_of_the_standard_library(provider: LocalProvider) -> None:
    """Of those that pytest itself does not import, and the plugin does: it would fail, or take the tests' own away."""
    files = {f"{REPO}/{name}.py": "NUMBER = 7\n" for name in ("resource", "cmd", "code")}
    own = "import cmd, resource\n    assert (resource.NUMBER, cmd.NUMBER) == (7, 7)\n"
    tests = f"{HIDDEN_TESTS}\n\ndef test_own():\n    {own}"
    for grader in (IDS, EvalCommand(command="python3 -m pytest -q tests")):
        task = repository_task(replace(SPEC, grader=grader), hidden_files={f"{REPO}/tests/test_calc.py": tests})
        verdict = await verdict_on(provider, replace(task, files={**task.files, **files}), SOLVE)
        assert verdict.reward == 1.0, verdict


TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -7,3 +7,7 @@

 def test_last():
     assert last([1, 3]) == 3
+
+
+def test_mean_of_nothing():
+    assert mean([]) == 0.0
"""


async def test_a_test_patch_overrides_the_agents_changes_to_the_tests(provider: LocalProvider) -> None:
    spec = replace(SPEC, grader=replace(IDS, test_patch=TEST_PATCH))
    task = repository_task(spec, hidden_files={})
    rewritten = "echo 'def test_mean_of_nothing(): pass' > tests/test_calc.py"
    assert (await verdict_on(provider, task, f"{SOLVE}; {rewritten}")).reward == 1.0
    assert (await verdict_on(provider, task, rewritten)).cause is Cause.FAILED
    broken = replace(spec, grader=replace(IDS, test_patch=TEST_PATCH.replace("last([1", "last([2")))
    assert (await verdict_on(provider, repository_task(broken, hidden_files={}), SOLVE)).cause is Cause.EVALUATOR


async def test_a_patch_keeps_its_bytes_line_endings_and_permissions(provider: LocalProvider) -> None:
    left = r"printf 'caf\351\r\nlast' > latin.txt; printf '' > empty.txt; mkdir -p 'a b'; printf 'x\n' > 'a b/ü.txt'"
    check = """
import os
names = ["latin.txt", "empty.txt", "a b/\\u00fc.txt"]
result = [[open(name, "rb").read().hex() for name in names], bool(os.stat("calc.py").st_mode & 0o100)]
"""
    expected = json.dumps([["caf\xe9\r\nlast".encode("latin-1").hex(), "", b"x\n".hex()], True])
    task = repository_task(check=check, expected=expected)
    verdict = await verdict_on(provider, task, f"{SOLVE}; {left}; chmod +x calc.py")
    assert (verdict.reward, verdict.detail) == (1.0, ""), verdict


async def test_a_repository_below_the_top_of_its_git_tree_can_be_patched(provider: LocalProvider) -> None:
    spec = replace(SPEC, prepare=(f"cd ..; {COMMIT}",))
    assert (await verdict_on(provider, repository_task(spec), SOLVE)).reward == 1.0


async def test_a_folder_without_git_can_be_patched(provider: LocalProvider) -> None:
    assert (await verdict_on(provider, repository_task(replace(SPEC, prepare=())), SOLVE)).reward == 1.0
    assert (await verdict_on(provider, repository_task(replace(SPEC, prepare=())), "true")).reward == 0.0


async def test_an_agent_that_commits_and_rewrites_history_is_scored_by_its_working_tree(
    provider: LocalProvider,
) -> None:
    commit = "git -c user.name=a -c user.email=a@example.invalid commit -qam done"
    command = f"{SOLVE}; {commit}; git checkout -q --orphan x; rm -rf .git/refs"
    assert (await verdict_on(provider, repository_task(), command, user="agent")).reward == 1.0


async def test_a_base_link_that_points_outside_the_tree_gives_no_access(provider: LocalProvider) -> None:
    spec = replace(SPEC, prepare=(f"ln -s /opt out; {COMMIT}",))
    check = "import os; result = [os.readlink('out'), os.path.exists('out/planted')]"
    task = repository_task(spec, check=check, expected='["/opt", false]')
    through = await verdict_on(provider, task, f"{SOLVE}; echo x > out/planted")
    assert (through.reward, through.detail) == (1.0, ""), through
    moved = await verdict_on(provider, task, f"{SOLVE}; rm out; mkdir out; echo x > out/planted")
    assert moved.cause is Cause.INVALID, moved
    turned = await verdict_on(provider, task, f"{SOLVE}; ln -sfn /etc out")
    assert (turned.reward, "out (symbolic link)" in turned.detail) == (1.0, True), turned
