"""The verifier of a task: Harbor's test script, or pytest files, run after the agent's end.

Invariants:
- No process of the agent is left when the first file of a verifier is written: a clean sandbox never had one, and in a
  live one all processes are killed, which a list of processes confirms.
- /tests and /logs/verifier are made anew, belong to root, and hold nothing of the agent.
- The exit code of a script is ignored: only the reward file that it leaves counts. Without one, with an unreadable one,
  or after a timeout there is no reward, even if the file was written before.
- A script finds no program in a folder that the agent could change: such folders are taken from its PATH. Python does
  not import from its working directory or from a user's packages.
- A live verifier refuses the sandbox of an agent that was root, unless the task allows it.

`docs/evaluation.md` (Verifiers) says what this cannot prevent.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from typing import Final

from headrace.actors.evaluation.graders.checks import run_check
from headrace.actors.evaluation.graders.history import task_files
from headrace.actors.evaluation.graders.verdict import (
    MAX_DETAIL_CHARACTERS,
    AgentSandboxes,
    CleanSandboxes,
    EvaluationRequest,
    EvaluatorFault,
    ProgramFailed,
    Verdict,
    broken,
    clean_spec,
    join_details,
    printed,
    rewarded,
    spec_with_data,
)
from headrace.actors.record.files.parts import in_part
from headrace.buffer.tasks.evaluators import VerifierEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.tasks.verifiers import LOGS, SCRIPT, TESTS, VerifierForm, pytest_files
from headrace.buffer.trajectories.breakdown import EVALUATE_APPLY
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import ExecTimeout, SandboxFileError

VERIFIER_RUNS: Final = 3
"""Number of runs in one evaluation that may each take `evaluator.timeout_s`: if the verifier breaks, it runs on the
untouched files and then once more."""
MAX_REWARD_BYTES: Final = 1 << 16
_STEP_TIMEOUT_S: Final = 20.0
_SYSTEM_PATH: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""Search path of our own commands, which an image's environment must not change."""
_ENVIRONMENT: Final = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
_END_ALL: Final = r"""
{ exec {never}<> <(:); } 2> /dev/null || never=
for ((round = 0; round < 200; round++)); do
  kill -KILL -1 2> /dev/null
  left=()
  for path in /proc/[0-9]*/stat; do
    process=${path//[!0-9]/} line=
    { IFS= read -r -d '' line < "$path"; } 2> /dev/null
    fields=(${line##*) })
    [[ ! $line || $process == 1 || $process == "$$" || ${fields[0]} == [ZX] ]] || left+=("$process")
  done
  ((${#left[@]})) || exit 0
  [[ $never ]] && read -r -t 0.02 -u "$never"
done
echo "${left[@]}"
exit 1
"""
"""Kills all processes except the first and itself: a signal to -1 spares the caller, and no concurrent fork escapes
it. Uses only builtins."""
_LAY_OUT: Final = f"""
umask 022
[ -d {LOGS} ] && [ ! -L {LOGS} ] && [ -O {LOGS} ] || rm -rf {LOGS}
rm -rf {LOGS}/verifier {TESTS} && mkdir -p {LOGS}/agent {LOGS}/artifacts {LOGS}/verifier {TESTS} &&
  chmod 755 {LOGS} {LOGS}/verifier {TESTS}
"""
_RUN: Final = rf"""
is_safe() {{
  local folder below owner group mode
  folder=$(cd -P -- "$1" 2> /dev/null && pwd) || return 1
  for below in $unsafe; do
    [[ $folder/ != "$below"/* && $1/ != "$below"/* ]] || return 1
  done
  [[ $user ]] || return 0
  while :; do
    read -r owner group mode <<< "$(stat -c '%u %g %a' -- "$folder")"
    [[ $mode && $owner != "$user" ]] && ((!(8#$mode & 2))) || return 1
    ((!(8#$mode & 020))) || [[ " $groups " != *" $group "* ]] || return 1
    [[ $folder != / ]] || return 0
    folder=${{folder%/*}}
    folder=${{folder:-/}}
  done
}}
given=$PATH PATH={_SYSTEM_PATH["PATH"]} safe= folders=
IFS=: read -r -a folders <<< "$given"
for folder in "${{folders[@]}}"; do
  if [[ $folder == /* ]] && is_safe "$folder"; then
    safe+=:$folder
  else
    echo "PATH without $folder: the agent could change it" >&2
  fi
done
chmod +x $scripts
export PATH=${{safe#:}}
unset -v user groups unsafe safe given folders folder
unset -f is_safe
({SCRIPT})
"""
_READ: Final = f"""
for name in json txt; do
  file={LOGS}/verifier/reward.$name
  if [ -e "$file" ] || [ -L "$file" ]; then
    [ -f "$file" ] && [ ! -L "$file" ] || exit 3
    echo $name && exec cat "$file"
  fi
done
exit 4
"""


async def score_verifier(task: Task, request: EvaluationRequest, sandboxes: AgentSandboxes) -> Verdict:
    """Score an agent's sandbox once: a frozen one, or a running one for a live verifier. Raises SandboxError,
    EvaluatorFault."""
    if _spec_of(task).verifier.live:
        async with sandboxes.live(request.sandbox) as sandbox:
            try:
                await end_agent(sandbox)
            except (ProgramFailed, ExecTimeout) as error:
                return broken(f"the agent's processes could not be ended: {error}")
            return await _verify(task, sandbox, await _agent_ids(task, request, sandbox))
    async with sandboxes.clean(spec_with_data(task, request)) as sandbox:
        return await _verify(task, sandbox)


async def score_untouched(task: Task, sandboxes: CleanSandboxes) -> Verdict:
    """Score the task's own files, in a clean sandbox. Raises SandboxError, EvaluatorFault, TaskFileError."""
    async with sandboxes.clean(clean_spec(task)) as sandbox:
        await sandbox.write_many(await task_files(task))
        return await _verify(task, sandbox)


async def end_agent(sandbox: Sandbox) -> None:
    """Kill all processes in a sandbox except its first. Raises ProgramFailed if one is left, SandboxError."""
    result = await sandbox.exec(_END_ALL, env=_SYSTEM_PATH, cwd="/", timeout_s=_STEP_TIMEOUT_S)
    if result.exit_code != 0:
        left = (result.stdout + result.stderr)[-200:].decode(errors="replace").strip()
        raise ProgramFailed(f"exit code {result.exit_code}, {left}")


def parse_reward(name: str, data: bytes) -> tuple[float, dict[str, float]]:
    """Return the reward in a reward file, and all rewards of reward.json by name. `name` is `txt` or `json`.

    The reward of an object is that of its key `reward`, or else its first value. Raises EvaluatorFault.
    """
    text = data.decode(errors="replace")
    if not text.strip():
        raise EvaluatorFault(f"reward.{name} is empty")
    try:
        found = {"reward": float(text)} if name == "txt" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EvaluatorFault(f"reward.{name} cannot be parsed: {text[:100]!r}") from error
    if not isinstance(found, dict) or not found:
        raise EvaluatorFault(f"reward.{name} must be an object with numbers by name: {text[:100]!r}")
    rewards: dict[str, float] = {}
    for key, value in found.items():
        try:
            rewards[key] = float(value) if isinstance(value, int | float) else math.nan
        except OverflowError:
            rewards[key] = math.inf
        if not math.isfinite(rewards[key]):
            raise EvaluatorFault(f"reward.{name}: {key[:50]!r} is not a finite number: {str(value)[:50]!r}")
    return rewards.get("reward", next(iter(rewards.values()))), rewards


def _spec_of(task: Task) -> VerifierEvaluator:
    assert isinstance(task.evaluator, VerifierEvaluator)
    return task.evaluator


async def _agent_ids(task: Task, request: EvaluationRequest, sandbox: Sandbox) -> tuple[int, ...]:
    """Return the user id and the group ids of an agent that is not root. Without real user ids in a sandbox, every user
    is root. Raises EvaluatorFault for root, unless the task allows it; its ids are empty."""
    command = 'echo $EUID "${GROUPS[@]}"'
    result = await sandbox.exec(
        command, user=request.agent_user, env=_SYSTEM_PATH, cwd="/", timeout_s=_STEP_TIMEOUT_S, max_output_bytes=4096
    )
    ids = tuple(int(word) for word in result.stdout.split() if word.isdigit()) if result.exit_code == 0 else ()
    if ids and ids[0] != 0:
        return ids
    if _spec_of(task).verifier.allow_root:
        return ()
    raise EvaluatorFault(
        f"a live verifier needs an agent that is not root, and its user is {request.agent_user}: set the user of the "
        "environment, or evaluator.verifier.allow_root"
    )


async def _verify(task: Task, sandbox: Sandbox, agent_ids: tuple[int, ...] | None = None) -> Verdict:
    """Lay out the tests in a sandbox without processes, run them and return the verdict. `agent_ids` are given for the
    sandbox of the agent. Raises SandboxError, EvaluatorFault."""
    spec = _spec_of(task)
    form = spec.verifier.form
    where = f"{form} verifier in {'a clean sandbox' if agent_ids is None else 'the sandbox of the agent'}"
    made = await sandbox.exec(_LAY_OUT, env=_SYSTEM_PATH, cwd="/", timeout_s=_STEP_TIMEOUT_S)
    if made.exit_code != 0:
        reason = made.stderr[-200:].decode(errors="replace").strip()
        return broken(f"{where}: {TESTS} and {LOGS} could not be made: {reason}")
    try:
        with in_part(EVALUATE_APPLY):
            await sandbox.write_many({path: text.encode() for path, text in spec.hidden_files.items()})
        if form is VerifierForm.HARBOR:
            verdict = await _run_script(spec, sandbox, agent_ids or ())
        else:
            options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", TESTS, "--confcutdir", TESTS]
            arguments = [*options, *pytest_files(spec.hidden_files)]
            check = f"import sys, pytest; sys.exit(pytest.main({arguments!r}))"
            verdict = await run_check(spec, check, sandbox, agent_ids=agent_ids or ())
    except ExecTimeout as error:
        verdict = broken(f"the verifier exceeded {error}")
    except SandboxFileError as error:
        verdict = broken(f"the verifier's files could not be written: {error}")
    except EvaluatorFault as error:
        verdict = broken(str(error))
    return replace(verdict, detail=join_details(where, verdict.detail))


async def _run_script(spec: VerifierEvaluator, sandbox: Sandbox, agent_ids: tuple[int, ...]) -> Verdict:
    """Run test.sh and return the verdict of its reward file. Raises SandboxError, EvaluatorFault."""
    verifier, hidden = spec.verifier, spec.hidden_files
    scripts = shlex.join(path for path, text in hidden.items() if path == SCRIPT or text.startswith("#!"))
    # Plain words for a loop: a data path with a blank is compared piece by piece, which only takes more from the PATH.
    unsafe = " ".join(spec.data_paths)
    user, groups = "".join(map(str, agent_ids[:1])), " ".join(map(str, agent_ids[1:]))
    settings = f"user={user} groups='{groups}' unsafe={shlex.quote(unsafe)}"
    ran = await sandbox.exec(
        f"{settings}\n{_RUN.replace('$scripts', scripts)}",
        env={**_ENVIRONMENT, **verifier.environment},
        cwd=verifier.workdir or None,
        timeout_s=spec.timeout_s,
    )
    log = printed(ran.stdout, ran.stderr)
    left = await sandbox.exec(
        _READ, env=_SYSTEM_PATH, cwd="/", timeout_s=_STEP_TIMEOUT_S, max_output_bytes=MAX_REWARD_BYTES
    )
    tail = log[-MAX_DETAIL_CHARACTERS // 2 :].strip()
    if left.exit_code != 0 or left.truncated:
        problem = {3: "is not a regular file", 4: "is missing"}.get(left.exit_code, "is too large or cannot be read")
        return replace(broken(f"the reward file {problem}; test.sh exited with {ran.exit_code}: {tail}"), log=log)
    name, _, data = left.stdout.partition(b"\n")
    try:
        reward, rewards = parse_reward(name.decode(), data)
        verdict = rewarded(reward, solved=reward >= verifier.solved_at)
    except EvaluatorFault as error:
        return replace(broken(f"{error}; test.sh exited with {ran.exit_code}: {tail}"), log=log)
    named = f"rewards {json.dumps(rewards)}"[:MAX_DETAIL_CHARACTERS] if len(rewards) > 1 else ""
    return replace(verdict, log=log, detail=join_details(named, tail if verdict.cause is Cause.FAILED else ""))
