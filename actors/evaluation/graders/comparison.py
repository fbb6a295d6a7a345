"""The out-of-process comparison: the agent's code computes plain data and never judges itself.

Invariants:
- The expected value never enters a sandbox: code that takes over the process still has to know the answer.
- Two values are equal if they are the same JSON: the agent's `__eq__` is never called, and neither `True` and `1` nor
  `1` and `1.0` are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from headrace.actors.evaluation.graders.verdict import Verdict, broken, failed, printed, solved
from headrace.actors.evaluation.in_sandbox import ISOLATED, program_command
from headrace.sandboxes.base import Sandbox

MAX_ANSWER_BYTES: Final = 1 << 20
COMPARE_USER: Final = "agent"


async def compare(
    sandbox: Sandbox,
    check: str,
    expected: str,
    *,
    python: str,
    options: str = f"{ISOLATED} -B",
    timeout_s: float,
    user: str = COMPARE_USER,
    cwd: str = "/",
    environment: Mapping[str, str] | None = None,
) -> Verdict:
    """Run `check` and compare its `result` with the JSON text `expected`; `options` are Python's command-line options.
    Raises ExecTimeout, SandboxGone."""
    result = await sandbox.exec(
        program_command(python, "compute", options=options),
        user=user,
        stdin=check.encode(),
        cwd=cwd,
        env=environment,
        timeout_s=timeout_s,
        max_output_bytes=MAX_ANSWER_BYTES,
    )
    answer = last_answer(result.stdout)
    tail = result.stderr.decode(errors="replace").strip()[-200:]
    if result.exit_code != 0 or result.truncated or answer is None:
        verdict = broken(f"the check ended with exit code {result.exit_code} and no answer: {tail}")
    elif "result" not in answer:
        verdict = failed(f"the check ended with {str(answer.get('error'))[:100]}: {tail}")
    elif same_json(answer["result"], json.loads(expected)):
        verdict = solved()
    else:
        verdict = failed("the result differs from the expected one")
    return replace(verdict, log=printed(result.stdout, result.stderr))


def last_answer(stdout: bytes) -> dict[str, Any] | None:
    """Parse the last line of the output. Returns None if it is not a JSON object."""
    try:
        answer = json.loads(stdout.rsplit(b"\n", 1)[-1])
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def same_json(one: object, other: object) -> bool:
    """Return whether two JSON values have the same types and values, recursively."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return one == other
