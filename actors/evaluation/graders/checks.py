"""The run of a task's check in a clean sandbox."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from headrace.actors.evaluation.graders.comparison import COMPARE_USER, compare, last_answer
from headrace.actors.evaluation.graders.history import make_account
from headrace.actors.evaluation.graders.verdict import (
    MAX_DETAIL_CHARACTERS,
    EvaluatorFault,
    Verdict,
    broken,
    failed,
    printed,
    rewarded,
    solved,
)
from headrace.actors.evaluation.in_sandbox import check as check_program
from headrace.actors.evaluation.in_sandbox import program_command, source
from headrace.buffer.tasks.evaluators import PYTHON, CompareEvaluator, PythonEvaluator
from headrace.sandboxes.base import ExecResult, ProgramRunner, Sandbox
from headrace.sandboxes.launcher.commands import PRELOADED


async def run_check(spec: PythonEvaluator, check: str, sandbox: Sandbox, *, agent_ids: Sequence[int] = ()) -> Verdict:
    """Run an evaluator's check, passed on standard input so that it is not stored in any file. It imports no packages
    that the user with `agent_ids` (user id, group ids) could change. Raises ExecTimeout, SandboxGone,
    EvaluatorFault."""
    if isinstance(spec, CompareEvaluator):
        await make_account(sandbox, COMPARE_USER)
        return await compare(sandbox, check, spec.expected, python=spec.python, timeout_s=spec.timeout_s)
    result = None
    if spec.python == PYTHON and isinstance(sandbox, ProgramRunner) and imports_only(check, PRELOADED):
        # A check that needs nothing of the image runs in an interpreter that is already up: starting one costs more
        # than the check.
        arguments = (check_program.PLAIN, *spec.data_paths)
        result = await sandbox.run_program(source("check"), arguments, stdin=check.encode(), timeout_s=spec.timeout_s)
    if result is None or result.exit_code == check_program.UNAVAILABLE:
        ids = ",".join(map(str, agent_ids))
        mode = f"{check_program.PACKAGES}={ids}" if ids else check_program.PACKAGES
        result = await sandbox.exec(
            program_command(spec.python, "check", mode, *spec.data_paths),
            stdin=check.encode(),
            cwd="/",
            timeout_s=spec.timeout_s,
        )
    return replace(_verdict(result), log=printed(result.stderr))


@lru_cache(maxsize=1024)
def imports_only(check: str, modules: frozenset[str]) -> bool:
    """Return True if a check's source imports only modules in `modules`."""
    try:
        nodes = list(ast.walk(ast.parse(check)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return imported <= modules and not named & {"__import__", "__builtins__", "__loader__"}


def _verdict(result: ExecResult) -> Verdict:
    """Return the verdict for the exit code and report of `in_sandbox.check`. Raises EvaluatorFault."""
    detail = result.stderr.decode(errors="replace")[-MAX_DETAIL_CHARACTERS:]
    if not result.stdout.startswith(check_program.BEGUN):
        return broken(f"the check did not start ({result.exit_code}): {detail}")
    match result.exit_code:
        case 0:
            return solved()
        case 1:
            return failed(detail)
        case check_program.REPORTED if (answer := last_answer(result.stdout)) is not None:
            if "reward" not in answer:
                raise EvaluatorFault(f"evaluator error: the reward is not a number: {answer.get('error')}")
            verdict = rewarded(answer["reward"], solved=answer.get("solved"))
            return verdict if verdict.solved else replace(verdict, detail=detail)
        case check_program.RAISED:
            return broken(f"the check raised an exception: {detail}")
        case code:
            return broken(f"the check ended with exit code {code}: {detail}")
