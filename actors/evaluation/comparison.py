"""Out-of-process comparison: the agent's code computes plain data, and is never asked whether it is right.

Invariants:
- What is expected never enters a sandbox: whoever takes over the computing process still has to know the answer.
- Two values are equal when they are the same JSON: no `__eq__` of the agent's, no `True == 1`, no `1 == 1.0`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.evaluation.verdict import Verdict, broken, failed, printed, solved
from headrace.actors.in_sandbox import ISOLATED, program_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.sandboxes.base import ExecResult, Sandbox

MAX_ANSWER_BYTES: Final = 1 << 20


async def compare(
    room: Sandbox,
    check: str,
    expected: str,
    *,
    python: str,
    options: str = f"{ISOLATED} -B",
    timeout_s: float,
    user: str = "agent",
    cwd: str = "/",
    environment: Mapping[str, str] | None = None,
) -> Verdict:
    """Run `check` and compare its `result` with the JSON text `expected`; `options` are Python's. Raises ExecTimeout,
    SandboxGone."""
    result = await room.exec(
        program_command(python, "compute", options=options),
        user=user,
        stdin=check.encode(),
        cwd=cwd,
        env=environment,
        timeout_s=timeout_s,
        max_output_bytes=MAX_ANSWER_BYTES,
    )
    log = printed(result.stdout, result.stderr)
    return replace(_verdict(result, json.loads(expected)), log=log)


def _verdict(result: ExecResult, expected: object) -> Verdict:
    answer = last_answer(result.stdout)
    if result.exit_code != 0 or result.truncated or answer is None:
        return broken(f"the check ended with {result.exit_code} and no answer: {_tail(result.stderr)}")
    if "result" not in answer:
        return failed(f"the check ended in {str(answer.get('error'))[:100]}: {_tail(result.stderr)}")
    return solved() if same_json(answer["result"], expected) else failed("the result is another one")


def _tail(stderr: bytes) -> str:
    return stderr.decode(errors="replace").strip()[-200:]


def last_answer(stdout: bytes) -> dict[str, Any] | None:
    """The object on the last line of an output; None where that is no JSON object."""
    try:
        answer = json.loads(stdout.rsplit(b"\n", 1)[-1])
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def same_json(one: object, other: object) -> bool:
    """Equal in type and value, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return one == other
