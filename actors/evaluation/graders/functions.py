"""Evaluators that are functions of an episode's record, each run in a process of its own.

Invariants:
- A function sees the task and the record as plain data, and no sandbox. Its process, with all that it started, is
  killed at the deadline.
- Every error in it (an exception, an exit, a result that is not a reward, a timeout) is the evaluator's fault and
  yields no reward.
- The result is the only thing on standard output: what a function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from headrace.actors.evaluation.graders.verdict import (
    EpisodeRecord,
    EvaluationRequest,
    EvaluatorFault,
    Verdict,
    broken,
    rewarded,
    rewarded_by,
)
from headrace.buffer.tasks.evaluators import FunctionEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.sanitizer import clean_text

_PROGRAM: Final = """\
import asyncio, importlib, inspect, json, os, sys
name, results = sys.argv[1], os.dup(1)
os.dup2(2, 1)
given = json.load(sys.stdin)
module, _, path = name.partition(":")
found = importlib.import_module(module)
for part in path.split("."):
    found = getattr(found, part)
result = found(given["task"], given["episode"])
if inspect.isawaitable(result):
    async def wait():
        return await result
    result = asyncio.run(wait())
with open(results, "w") as file:
    json.dump(result, file)
"""
"""Imports nothing from headrace, so that it starts in milliseconds."""
MAX_ERROR_CHARACTERS: Final = 300


async def score_by_function(spec: FunctionEvaluator, task: Task, request: EvaluationRequest) -> Verdict:
    """Return the verdict of a task's function, which returns a reward, or `{"reward": ..., "solved": ...}`."""
    if request.episode is None:
        return broken("the evaluator `function` needs the record of a loop agent; set agent.kind to loop")
    given = {"task": asdict(task), "episode": document_of(request.episode)}
    try:
        result = await called(spec.function, json.dumps(given, default=str).encode(), spec.timeout_s)
        if not isinstance(result, dict):
            return rewarded(result, solved=None)
        return rewarded_by(result)
    except TimeoutError:
        return broken(f"{spec.function} exceeded timeout_s={spec.timeout_s:g}")
    except EvaluatorFault as error:
        return broken(clean_text(f"{spec.function}: {error}"))


def document_of(episode: EpisodeRecord) -> dict[str, Any]:
    """Return the record of an episode as plain data."""
    parts = [
        {"source": part.source.value, "text": part.text}
        | ({"calls": [{"name": call.name, "arguments": call.arguments} for call in part.calls]} if part.calls else {})
        for part in episode.parts
    ]
    return {"parts": parts, "artifacts": dict(episode.artifacts)}


async def called(function: str, given: bytes, timeout_s: float) -> object:
    """Call a function in a new process and return its result. Raises TimeoutError, EvaluatorFault."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _PROGRAM, function),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        async with asyncio.timeout(timeout_s):
            result, errors = await process.communicate(given)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip()[-MAX_ERROR_CHARACTERS:].splitlines()
        raise EvaluatorFault(f"ended with exit code {process.returncode}: {lines[-1] if lines else 'no output'}")
    try:
        return json.loads(result)
    except ValueError as error:
        raise EvaluatorFault(f"returned no JSON: {result[:100]!r}") from error
