"""Verifiers in real sandboxes: Harbor's verdicts, and attacks on them."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.actors.environments.environment import Action
from headrace.actors.environments.terminal import TerminalConfig, TerminalEnvironment
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.evaluation.graders.history import task_files
from headrace.actors.evaluation.graders.verifier import end_agent
from headrace.buffer.tasks.evaluators import StateEvaluator, VerifierEvaluator
from headrace.buffer.tasks.parts import BinaryFile
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.tasks.verifiers import VerifierForm, VerifierSpec
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider
from support.clean_sandboxes import CleanSandboxes
from support.repositories import PYTEST, install_pytest

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
ANSWER = "/workspace/answer"
GRADE = f"""\
#!/bin/bash
if [ "$(cat {ANSWER})" = 2 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
BOTH = pytest.mark.parametrize("live", [False, True], ids=["clean", "live"])
VENV = "/opt/venv"
MAKE_VENV = f"""
folder={VENV}/lib/python$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
mkdir -p {VENV}/bin "$folder"
ln -s /usr/bin/python3 {VENV}/bin/python
echo 'home = /usr/bin' > {VENV}/pyvenv.cfg
mv {PYTEST}/* "$folder"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image(provider: LocalProvider) -> str:
    """Image with pytest in a virtual environment."""
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await install_pytest(sandbox)
    made = await sandbox.exec(MAKE_VENV, cwd="/", timeout_s=30)
    assert made.exit_code == 0, made
    # It compiles the modules that every test here imports.
    first = (
        f"echo 'def test_a(): pass' > /tmp/test_a.py; {VENV}/bin/python -m pytest -q -p no:cacheprovider /tmp/test_a.py"
    )
    await sandbox.exec(first, timeout_s=30)
    return await sandbox.snapshot()


def harbor_task(script: str, *, timeout_s: float = 20.0, data: str = "/workspace", **verifier: object) -> Task:
    spec = VerifierSpec(form=VerifierForm.HARBOR, **verifier)  # type: ignore[arg-type]
    evaluator = VerifierEvaluator(
        verifier=spec,
        hidden_files={"/tests/test.sh": script},
        timeout_s=timeout_s,
        data_paths=(data,),
    )
    return Task(id=TaskId("two"), family="own", instruction="write 2", evaluator=evaluator, files={ANSWER: "1\n"})


def pytest_task(*, live: bool, python: str = f"{VENV}/bin/python") -> Task:
    tests = f"def test_answer():\n    assert open('{ANSWER}').read() == '2\\n'\n"
    evaluator = VerifierEvaluator(
        verifier=VerifierSpec(form=VerifierForm.PYTEST, live=live),
        hidden_files={"/tests/test_state.py": tests},
        python=python,
    )
    return Task(id=TaskId("two"), family="own", instruction="write 2", evaluator=evaluator, files={ANSWER: "1\n"})


async def verdict_on(
    provider: LocalProvider,
    task: Task,
    command: str = "true",
    *,
    user: str = "agent",
    image: str = "host",
    before: str = "true",
) -> Verdict:
    """The verdict after root has run `before` and the agent has run a command."""
    task = replace(task, image=image)
    ref = await provider.create(SandboxSpec(image=image))
    sandbox = await provider.attach(ref)
    try:
        await sandbox.write_many(await task_files(task))
        ready = await sandbox.exec(f"chown -R agent /workspace; {before}", timeout_s=20)
        assert ready.exit_code == 0, ready
        await sandbox.exec(command, cwd="/workspace", user=user, timeout_s=20)
        request = EvaluationRequest(key="1", task_id=task.id, sandbox=ref, agent_user=user)
        return await evaluate(task, request, CleanSandboxes(provider, sandbox))
    finally:
        await sandbox.kill()


JSON = "/logs/verifier/reward.json"
TXT = "/logs/verifier/reward.txt"
HARBOR_VERDICTS: Mapping[str, tuple[str, float | None, str]] = {
    "no file": ("true", None, "the reward file is missing"),
    "empty file": (f": > {TXT}", None, "reward.txt is empty"),
    "nan": (f"echo nan > {TXT}", None, "not a finite number"),
    "a word": (f"echo PASS > {TXT}", None, "cannot be parsed"),
    "spaces": (f"printf ' 2.5 ' > {TXT}", 2.5, ""),
    "negative": (f"echo -1 > {TXT}", -1.0, ""),
    "exit code 1": (f"echo 1 > {TXT}; exit 1", 1.0, ""),
    "both files": (f"echo 1 > {TXT}; echo '{{\"reward\": 0}}' > {JSON}", 0.0, ""),
    "a bare number": (f"echo 0.75 > {JSON}", None, "must be an object"),
    "a list": (f"echo '[1]' > {JSON}", None, "must be an object"),
    "an object in it": (f"echo '{{\"reward\": {{}}}}' > {JSON}", None, "not a finite number"),
    "several": (f'echo \'{{"a": 1, "b": 0}}\' > {JSON}', 1.0, 'rewards {"a": 1.0, "b": 0.0}'),
    "true": (f"echo '{{\"reward\": true}}' > {JSON}", 1.0, ""),
    "a link": (f"echo 1 > /tmp/r; ln -s /tmp/r {TXT}", None, "is not a regular file"),
    "beyond the bound": (f"echo 1e9 > {TXT}", None, "the reward"),
    "too large": (f"head -c 100000 /dev/zero | tr '\\0' 1 > {TXT}", None, "is too large"),
}


@pytest.mark.parametrize("name", HARBOR_VERDICTS)
async def test_verdicts_equal_harbors(provider: LocalProvider, name: str) -> None:
    script, reward, said = HARBOR_VERDICTS[name]
    verdict = await verdict_on(provider, harbor_task(script))
    assert verdict.reward == reward, verdict
    assert said in verdict.detail, verdict
    expected = Cause.EVALUATOR if reward is None else Cause.SOLVED if reward >= 1 else Cause.FAILED
    assert (verdict.cause, verdict.solved) == (expected, expected is Cause.SOLVED)
    assert verdict.detail.startswith("harbor verifier in a clean sandbox")


async def test_a_script_that_hangs_gives_no_reward_although_it_wrote_one(provider: LocalProvider) -> None:
    """F12."""
    verdict = await verdict_on(provider, harbor_task(f"echo 1 > {TXT}; sleep 1000", timeout_s=0.5))
    assert (verdict.reward, verdict.cause, "exceeded" in verdict.detail) == (None, Cause.EVALUATOR, True), verdict


async def test_the_task_says_from_which_reward_it_is_solved(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, harbor_task(f"echo 0.5 > {TXT}", solved_at=0.5))
    assert (verdict.reward, verdict.solved, verdict.cause) == (0.5, True, Cause.SOLVED)


@BOTH
async def test_the_state_that_the_agent_left_is_scored(provider: LocalProvider, *, live: bool) -> None:
    task = harbor_task(GRADE, live=live)
    verdict = await verdict_on(provider, task, "echo 2 > answer")
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict
    assert verdict.detail == f"harbor verifier in {'the sandbox of the agent' if live else 'a clean sandbox'}"
    verdict = await verdict_on(provider, task)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict


@BOTH
async def test_pytest_files_score_the_state(provider: LocalProvider, image: str, *, live: bool) -> None:
    task = pytest_task(live=live)
    verdict = await verdict_on(provider, task, "echo 2 > answer", image=image)
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict
    verdict = await verdict_on(provider, task, image=image)
    assert (verdict.reward, verdict.cause, "1 failed" in verdict.detail) == (0.0, Cause.FAILED, True), verdict


async def test_tests_that_cannot_run_are_an_evaluator_error(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, pytest_task(live=False, python="/usr/bin/python3"))
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR), verdict


async def test_only_the_agents_files_break_the_verifier(provider: LocalProvider) -> None:
    """The agent does not escape a zero by breaking it."""
    script = f"grep -q . {ANSWER} && echo 0 > {TXT}"
    for live in (False, True):
        verdict = await verdict_on(provider, harbor_task(script, live=live), ": > answer")
        assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


@pytest.mark.parametrize("kind", [VerifierEvaluator, StateEvaluator])
async def test_an_agent_that_removes_a_binary_file_breaks_the_check(
    provider: LocalProvider, tmp_path: Path, kind: type
) -> None:
    """The untouched files that clear the evaluator include those that are not text."""
    content = b"\x89PNG\r\n\0\xff"
    (tmp_path / "image.png").write_bytes(content)
    image = BinaryFile(file=str(tmp_path / "image.png"), sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    task = harbor_task(f"grep -q . /workspace/image.png && echo 0 > {TXT}")
    if kind is StateEvaluator:
        check = "open('/workspace/image.png', 'rb').read(); raise SystemExit(1)"
        task = replace(task, evaluator=StateEvaluator(check=check, timeout_s=20.0))
    task = replace(task, binary_files={"/workspace/image.png": image})
    verdict = await verdict_on(provider, task)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict
    verdict = await verdict_on(provider, task, "rm -f image.png")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


async def test_a_live_verifier_refuses_an_agent_that_was_root(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, harbor_task(GRADE, live=True), "echo 2 > answer", user="root")
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)
    assert "needs an agent that is not root" in verdict.detail
    allowed = harbor_task(GRADE, live=True, allow_root=True)
    assert (await verdict_on(provider, allowed, "echo 2 > answer", user="root")).reward == 1.0


async def test_all_processes_of_a_sandbox_are_ended(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    stubborn = "trap '' INT TERM HUP; while :; do (exec -a '12 (S) 1' sleep 5000) & wait; done"
    for user in ("agent", "root"):
        await sandbox.exec(f"for i in 1 2 3; do setsid bash -c {shlex.quote(stubborn)} & done", user=user, timeout_s=20)
    await sandbox.spawn("sleep 5001")
    await end_agent(sandbox)
    listing = await sandbox.exec("ps axo args --no-headers | grep -v '^ps\\|^grep\\|headrace'", timeout_s=20)
    assert listing.stdout.split(b"\n")[:-1] == [line for line in listing.stdout.split(b"\n") if b"ps axo" in line]
    await sandbox.kill()


# Each would earn 1 if it worked: the answer stays wrong.
WRITER = "while :; do echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json; done"
PASS_ALL = "import os, sys\nopen('/logs/verifier/reward.txt', 'w').write('1')\nos._exit(0)\n"
PLANT_MODULES = "".join(
    f"printf %s {shlex.quote(PASS_ALL)} > {name}.py; "
    for name in ("pytest", "_pytest", "conftest", "sitecustomize", "usercustomize", "pluggy", "json")
)
SHIMS = (
    "for name in bash cat python3 pytest grep; do printf '#!/bin/sh\\necho 1 > %s\\necho 2\\n' $FILE > $PLACE/$name; "
)
SHIM = SHIMS.replace("$FILE", TXT) + "chmod +x $PLACE/$name; done"
ATTACKS = {
    "markers": "for i in 1 2 3; do printf '\\0360123456789abcdef>0\\036'; done",
    "reward written": f"mkdir -p /logs/verifier; echo 1 > {TXT}; echo '{{\"reward\": 1}}' > {JSON}",
    "background writer": f"setsid bash -c {shlex.quote(WRITER)} > /dev/null 2>&1 &",
    "planted modules": f"{PLANT_MODULES} mkdir -p /home/agent; cd /home/agent && {{ {PLANT_MODULES} }}",
    "planted tests": f"mkdir -p /tests; echo 'echo 1 > {TXT}' > /tests/test.sh; ln -s /etc /tests/link",
    "PATH shim": f"for PLACE in /workspace/bin /opt/tools; do mkdir -p $PLACE; {SHIM}; done",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
}
# A script that is careless: it runs in the agent's folder, finds its programs on the PATH, and believes any of them.
CARELESS = f"""\
cd /workspace
solved=0
{VENV}/bin/python -m pytest -q /tests/test_state.py && solved=1
[ "$(cat answer)" = 2 ] && solved=1
python3 -c 'import json; assert open("answer").read() == "2\\n"' && solved=1
echo $solved > {TXT}
"""
OPEN_FOLDERS = "mkdir -p /opt/tools /logs/verifier /tests; chmod 777 /opt/tools /logs /logs/verifier /tests"


def careless_task(*, live: bool, **environment: str) -> Task:
    path = {"PATH": "/opt/tools:/workspace/bin:/usr/bin:/bin"}
    task = harbor_task(CARELESS, live=live, environment=path | environment)
    hidden = {**task.evaluator.hidden_files, **pytest_task(live=live).evaluator.hidden_files}
    evaluator = VerifierEvaluator(verifier=task.evaluator.verifier, hidden_files=hidden)
    return Task(id=task.id, family="own", instruction="write 2", evaluator=evaluator, files=task.files)


ALL_AT_ONCE = "\n".join(f"cd /workspace; {command}" for command in ATTACKS.values())


@BOTH
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(ALL_AT_ONCE, id="all at once"),
        *(pytest.param(command, id=name, marks=pytest.mark.slow) for name, command in ATTACKS.items()),
    ],
)
async def test_tampering_earns_no_reward_f23(provider: LocalProvider, image: str, command: str, *, live: bool) -> None:
    """F23: the answer is wrong, so that only an attack could earn a reward."""
    task = careless_task(live=live)
    verdict = await verdict_on(provider, task, command, image=image, before=OPEN_FOLDERS)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict


@pytest.mark.slow
@BOTH
async def test_planted_modules_work_where_the_task_gives_up_the_safe_path(
    provider: LocalProvider, image: str, *, live: bool
) -> None:
    """It shows that the attack is real."""
    task, command = careless_task(live=live, PYTHONSAFEPATH=""), ATTACKS["planted modules"]
    verdict = await verdict_on(provider, task, command, image=image, before=OPEN_FOLDERS)
    assert verdict.reward == 1.0, verdict


@BOTH
async def test_tampering_with_pytest_earns_no_reward_f23(provider: LocalProvider, image: str, *, live: bool) -> None:
    task = pytest_task(live=live)
    verdict = await verdict_on(provider, task, ALL_AT_ONCE, image=image, before=OPEN_FOLDERS)
    assert (verdict.reward, verdict.cause, "1 failed" in verdict.detail) == (0.0, Cause.FAILED, True), verdict


@pytest.mark.slow
@BOTH
async def test_the_attacks_do_not_spoil_an_honest_answer(provider: LocalProvider, image: str, *, live: bool) -> None:
    """The careless script can be passed, whatever lies beside the answer."""
    task, command = careless_task(live=live), f"{ALL_AT_ONCE}\ncd /workspace; echo 2 > answer"
    verdict = await verdict_on(provider, task, command, image=image, before=OPEN_FOLDERS)
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict


@pytest.mark.slow
async def test_packages_that_the_agent_could_change_are_not_imported_by_live_tests(
    provider: LocalProvider, image: str
) -> None:
    """Site folders of an interpreter that belong to the agent, as in an image that was set up for it."""
    before = f"chown -R agent {VENV}/lib"
    command = f"printf %s {shlex.quote(PASS_ALL)} > {VENV}/lib/python3*/site-packages/pytest.py"
    verdict = await verdict_on(provider, pytest_task(live=True), command, image=image, before=before)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID), verdict


async def test_folders_that_the_agent_could_change_are_taken_from_the_path(provider: LocalProvider) -> None:
    script = f'echo "$PATH" >&2; case $PATH in *tools*) echo 1;; *) echo 0;; esac > {TXT}'
    for live in (False, True):
        task = harbor_task(script, live=live, data="/opt/tools", environment={"PATH": "/opt/tools:/usr/bin:/bin"})
        verdict = await verdict_on(provider, task, before=OPEN_FOLDERS)
        assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict
        assert "PATH without /opt/tools: the agent could change it" in verdict.detail
    task = harbor_task(script, live=True, environment={"PATH": "/opt/owned/tools:/usr/bin:/bin"})
    owned = "mkdir -p /opt/owned/tools"
    assert (await verdict_on(provider, task, before=owned)).reward == 1.0
    assert (await verdict_on(provider, task, before=f"{owned}; chown agent /opt/owned")).reward == 0.0
    assert (
        await verdict_on(provider, task, before=f"{owned}; chgrp agent /opt/owned; chmod g+w /opt/owned")
    ).reward == 0


async def test_an_agent_in_a_terminal_cannot_print_its_way_to_a_reward(provider: LocalProvider) -> None:
    """A shell that prints end markers, and a job of it that waits for the verifier."""
    task = harbor_task(GRADE, live=True)
    ref = await provider.create(SandboxSpec())
    sandbox = await provider.attach(ref)
    await sandbox.write_many(await task_files(task))
    environment = TerminalEnvironment(TerminalConfig(user="agent"))
    episode = await environment.open(task, sandbox, None, time.monotonic)  # type: ignore[arg-type]
    for command in (ATTACKS["markers"], ATTACKS["background writer"], "trap 'exec bash' EXIT"):
        await episode.act(Action(name="run", arguments={"command": command}))
    await episode.close()
    request = EvaluationRequest(key="1", task_id=task.id, sandbox=ref, agent_user="agent")
    verdict = await evaluate(task, request, CleanSandboxes(provider, sandbox))
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict
    await sandbox.kill()
