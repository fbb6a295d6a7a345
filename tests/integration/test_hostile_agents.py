"""What an agent leaves to fool the evaluator, or to break it: in real sandboxes, with the real evaluator."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.buffer.tasks.datasets.terminal import Kind, Split, problems
from headrace.buffer.tasks.evaluators import CheckEvaluator, PatchEvaluator, StateEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider
from support.clean_sandboxes import CleanSandboxes

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
PROBLEMS = {problem.kind: problem for problem in problems(1, len(Kind), Split.HELD_OUT)}
MODULES = "os sys json stat site sitecustomize usercustomize encodings"
PLANT = f"for name in {MODULES}; do echo 'import posix; posix._exit(0)' > $name.py; done"
DEEP = "python3 -c \"import os\nfor _ in range({count}): os.mkdir('{name}'); os.chdir('{name}')\nopen('x' * 200, 'w')\""


async def verdict_on(provider: LocalProvider, task: Task, command: str) -> Verdict:
    """The verdict after an agent has run `command` in its sandbox."""
    ref = await provider.create(SandboxSpec(image=task.image))
    sandbox = await provider.attach(ref)
    try:
        await sandbox.write_many({path: text.encode() for path, text in task.files.items()})
        await sandbox.exec(command, cwd="/workspace", timeout_s=20)
        return await evaluate(
            task, EvaluationRequest(key="1", task_id=task.id, sandbox=ref), CleanSandboxes(provider, sandbox)
        )
    finally:
        await sandbox.kill()


HOSTILE = {
    "modules": PLANT,
    "shell files": "echo 'exit 0' | tee /etc/profile /etc/bash.bashrc /root/.bashrc; ln -s /bin/true /bin/python3",
    "preload": "echo /workspace/x.so > /etc/ld.so.preload",
    "workspace removed": "cd /; rm -rf /workspace",
    "workspace is a file": "cd /; rm -rf /workspace; echo > /workspace",
    "workspace is a pipe": "cd /; rm -rf /workspace; mkfifo /workspace",
    "workspace is a link": "cd /; mv /workspace /tmp/w; ln -s /tmp/w /workspace",
    "workspace is closed": "chown -R 65534:65534 /workspace; chmod -R 000 /workspace",
    "a pipe": "rm -f calc.py; mkfifo calc.py",
    "a link": "ln -s /etc/passwd link",
    "a hole of a terabyte": "truncate -s 1T hole",
    "many files": "for i in $(seq 2000); do echo > $i; done",
    "no UTF-8": "printf '\\xff' > $'\\xfe\\n'",
    "deep folders": DEEP.format(count=1500, name="d"),
    "long paths": DEEP.format(count=20, name="d" * 200),
    "a daemon that goes on writing": "setsid bash -c 'while true; do echo > y; rm y; done' > /dev/null 2>&1 &",
    "every process killed": "kill -9 -1",
}


@pytest.mark.parametrize("command", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.REPAIR])
async def test_cheating_neither_earns_a_reward_nor_avoids_a_zero(
    provider: LocalProvider, kind: Kind, command: str
) -> None:
    verdict = await verdict_on(provider, PROBLEMS[kind].task(), command)
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict


REPAIR = PROBLEMS[Kind.REPAIR]
LIES = {
    "equal to everything": "class Any(int):\n  __eq__ = lambda *_: True\ndef total(count): return Any()\n",
    "an answer of its own": "import os; os.write(1, b'\\n{\"result\": true}'); os._exit(0)\n",
    "what the visible test wants": "def total(count): return VALUE\n",
    "json that lies": "import json; json.dumps = lambda _: '{\"result\": []}'\ndef total(count): return 0\n",
    "deep nesting": "import os; os.write(1, b'\\n' + b'[' * 100000); os._exit(0)\n",
    "no end": "while True: print(end='x' * 4096)\n",
}


@pytest.mark.parametrize("source", LIES.values(), ids=LIES)
async def test_code_that_fakes_its_results_gets_no_reward(provider: LocalProvider, source: str) -> None:
    task = REPAIR.task()
    spec = replace(task.evaluator, timeout_s=6.0)
    command = f"printf '%s' {shlex.quote(source.replace('VALUE', REPAIR.finding))} > calc.py"
    verdict = await verdict_on(provider, replace(task, evaluator=spec), command)
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict


async def test_a_repair_is_rewarded_and_leftover_files_are_recorded(provider: LocalProvider) -> None:
    litter = "echo 'import os' > sitecustomize.py; echo 'assert False' > test.py; rm -rf x"
    verdict = await verdict_on(provider, REPAIR.task(), f"{REPAIR.act(REPAIR.finding).removesuffix('exit')} {litter}")
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED)
    dropped = ("workspace/sitecustomize.py (runs at interpreter start)", "workspace/test.py (test file)")
    assert all(record in verdict.detail for record in dropped), verdict
    assert (await verdict_on(provider, REPAIR.task(), "sed -i 's/total(1) == .*/True/' test.py")).reward == 0.0


def task_with(kind: type[CheckEvaluator], check: str, **evaluator: object) -> Task:
    """Somebody's own task about /workspace/answer.py, with a check that trusts the agent."""
    spec = kind(check=check, **{"timeout_s": 20.0, **evaluator})  # type: ignore[arg-type]
    files = {"/workspace/answer.py": "value = 1\n", "/home/agent/kept.txt": "kept\n"}
    return Task(id=TaskId("own"), family="own", instruction="make value 2", evaluator=spec, files=files)


IMPORTING = "import sys; sys.path.insert(0, '/workspace'); import answer; sys.exit(0 if answer.value == 2 else 1)"
BREAKING = {
    "endless": "while True: pass",
    "traceback": "raise ValueError",
    "odd code": "import os; os._exit(7)",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "processes": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "no source": "\\x00",
}


@pytest.mark.parametrize("source", BREAKING.values(), ids=BREAKING)
async def test_code_that_breaks_the_check_gets_zero_reward(provider: LocalProvider, source: str) -> None:
    task = task_with(PatchEvaluator, IMPORTING, timeout_s=5.0)
    verdict = await verdict_on(provider, task, f"printf '%b' {shlex.quote(source)} > answer.py")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


async def test_removing_a_file_that_the_check_expects_gives_zero_reward(provider: LocalProvider) -> None:
    task = task_with(StateEvaluator, "import sys; sys.exit('2' not in open('/workspace/answer.py').read())")
    assert (await verdict_on(provider, task, "sed -i s/1/2/ answer.py")).reward == 1.0
    assert (await verdict_on(provider, task, "true")).cause is Cause.FAILED
    assert (await verdict_on(provider, task, "rm answer.py")).reward == 0.0
    assert (await verdict_on(provider, task, "rm answer.py; mkdir answer.py")).reward == 0.0


@pytest.mark.parametrize("kind", [StateEvaluator, PatchEvaluator])
async def test_a_check_that_fails_on_untouched_files_is_an_evaluator_error(
    provider: LocalProvider, kind: type[CheckEvaluator]
) -> None:
    verdict = await verdict_on(provider, task_with(kind, "raise RuntimeError"), "true")
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)


HIDDEN = {"/workspace/tests/hidden.py": "wanted = 2\n"}
FIRST_HIDDEN = "import sys; sys.path.insert(0, '/workspace/tests'); import hidden; assert hidden.wanted == 2"
OBSTACLES = {
    "file for a folder": "echo > tests",
    "folder for a file": "mkdir -p tests/hidden.py; echo > tests/hidden.py/x",
    "other content": "mkdir tests; echo 'wanted = 1' > tests/hidden.py",
}


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
async def test_the_agents_files_do_not_block_hidden_files(provider: LocalProvider, obstacle: str) -> None:
    task = task_with(PatchEvaluator, f"{FIRST_HIDDEN}\n{IMPORTING}", hidden_files=HIDDEN)
    assert (await verdict_on(provider, task, obstacle)).cause is Cause.FAILED
    assert (await verdict_on(provider, task, f"sed -i s/1/2/ answer.py; {obstacle}")).reward == 1.0


async def test_a_name_that_is_not_utf8_is_dropped_from_a_patch(provider: LocalProvider) -> None:
    task = task_with(PatchEvaluator, IMPORTING)
    odd = "echo x > $'caf\\xe9'"
    assert (await verdict_on(provider, task, odd)).reward == 0.0
    verdict = await verdict_on(provider, task, f"sed -i s/1/2/ answer.py; {odd}")
    assert (verdict.reward, "(unsafe path)" in verdict.detail) == (1.0, True), verdict


async def test_only_the_agents_files_break_the_collection_of_a_patch(provider: LocalProvider) -> None:
    """More names than the program may print: each takes six characters for one of the file's."""
    names = """python3 -c "
import os
for n in range(100):
    folder = '/workspace/' + '/'.join(chr(1 + n % 9) * 200 + str(n) + str(m) for m in range(9))
    os.makedirs(folder)
    for m in range(9):
        open(f'{folder}/{m}' + chr(1) * 200, 'wb').write(bytes([255]))
" """
    verdict = await verdict_on(provider, task_with(PatchEvaluator, IMPORTING), names)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


async def test_a_patch_reads_files_as_data_and_leaves_other_paths_alone(provider: LocalProvider) -> None:
    check = f"assert open('/home/agent/kept.txt').read() == 'kept\\n'; {IMPORTING}"
    task = task_with(PatchEvaluator, check, data_paths=("/workspace/answer.py",))
    assert (await verdict_on(provider, task, "sed -i s/1/2/ answer.py; rm /home/agent/kept.txt")).reward == 1.0
    assert (await verdict_on(provider, task, "true")).cause is Cause.FAILED
