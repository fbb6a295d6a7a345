"""The scoring of a rollout, after its agent has ended.

Invariants:
- The agent's sandbox is frozen before its files are read; none of its processes ever runs again. (A live verifier kills
  the processes instead, and runs in that sandbox.)
- A check runs in a clean sandbox that contains nothing from the agent except the declared data paths: no shell files,
  preloads, PATH entries or processes.
- Exit code 0 of a check means reward 1 and exit code 1 means reward 0, unless the check sets `reward` itself; any other
  exit code means that the check broke. (For the kinds compare and repository, a comparison outside the sandbox and a
  report by test id, respectively, decide instead of the exit code, and for the kind verifier its reward file.)
- A reward that is not a number within the bound is the evaluator's fault, whatever the agent's files contain.
- Breaking the check does not avoid a reward of 0: a check that breaks twice on the agent's files, but not on the task's
  untouched files, was broken by the agent, which yields reward 0. A check that breaks on untouched files is faulty.
- Hidden files are written after the agent has ended, in a sandbox that it never had access to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.checks import run_check
from headrace.actors.evaluation.graders.diff_filter import summary
from headrace.actors.evaluation.graders.history import task_files
from headrace.actors.evaluation.graders.patch import Patch, collect_patch
from headrace.actors.evaluation.graders.patch_collection import LeftDiff
from headrace.actors.evaluation.graders.plugins import score_by_plugin
from headrace.actors.evaluation.graders.repository import grade, score_repository
from headrace.actors.evaluation.graders.verdict import (
    NO_SANDBOX,
    AgentSandboxes,
    CleanSandboxes,
    EvaluationRequest,
    EvaluatorFault,
    PatchRefused,
    Verdict,
    broken,
    clean_spec,
    collect_twice,
    failed,
    invalid,
    join_details,
    printed,
    spec_with_data,
)
from headrace.actors.evaluation.graders.verifier import score_untouched, score_verifier
from headrace.actors.record.files.parts import in_part
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.evaluators import (
    CheckEvaluator,
    CompareEvaluator,
    PatchEvaluator,
    PluginEvaluator,
    RepositoryEvaluator,
    StateEvaluator,
    VerifierEvaluator,
)
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.breakdown import EVALUATE_APPLY
from headrace.buffer.trajectories.sanitizer import clean_text
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, FrozenPathRefused, SandboxError, SandboxFileError

__all__ = ["CleanSandboxes", "EvaluationRequest", "Verdict", "evaluate"]


def verdict_of_environment(request: EvaluationRequest) -> Verdict:
    """Return the verdict of an episode's environment."""
    if request.episode is None or request.episode.verdict is None:
        return broken("the environment returned no verdict; choose another evaluator or environment")
    return request.episode.verdict


async def evaluate(
    task: Task, request: EvaluationRequest, sandboxes: AgentSandboxes, baselines: Baselines | None = None
) -> Verdict:
    """Score one rollout. `baselines` keeps what was found without changes. Sandbox errors become
    verdicts with cause infra; only programming errors are raised."""
    baselines = baselines or Baselines()
    has_files = request.sandbox != NO_SANDBOX
    if not has_files and not isinstance(task.evaluator, PluginEvaluator):
        return broken(f"the evaluator {task.evaluator.kind} needs the files of a sandbox, and there is none")
    try:
        if has_files and not is_live(task):
            await sandboxes.freeze(request.sandbox.id)
        verdict = await _score(task, request, sandboxes, baselines)
        if verdict.cause is Cause.EVALUATOR:
            verdict = await _blame(task, request, sandboxes, baselines, verdict)
        # The detail is written to ledger, spans and JSON, which refuse lone surrogates.
        verdict = replace(verdict, detail=clean_text(verdict.detail))
        if not request.keep:
            return replace(verdict, log="", patch="")
        if isinstance(task.evaluator, StateEvaluator | VerifierEvaluator) and not is_live(task):
            return await _with_patch(task, request, sandboxes, verdict)
        return verdict
    except FrozenPathRefused as error:
        return failed(f"a data path was removed or is of a different type: {error}")
    except (EvaluatorFault, TaskFileError) as error:
        return broken(str(error))
    except SandboxError as error:
        return Verdict(reward=None, cause=Cause.INFRA, detail=f"{type(error).__name__}: {error}")


def is_live(task: Task) -> bool:
    """Return whether a task is scored in the agent's own sandbox."""
    return isinstance(task.evaluator, VerifierEvaluator) and task.evaluator.verifier.live


async def _with_patch(task: Task, request: EvaluationRequest, sandboxes: CleanSandboxes, verdict: Verdict) -> Verdict:
    """Collect the patch for a task that is scored by its state. The patch is only for the record, so errors do not
    change the verdict."""
    try:
        async with sandboxes.clean(spec_with_data(task, request)) as sandbox:
            patch = await collect_patch(task, sandbox)
    except (PatchRefused, SandboxError) as error:
        return replace(verdict, log=printed(verdict.log, f"the agent's files cannot be turned into a patch: {error}"))
    return replace(verdict, log=printed(verdict.log, summary(patch.dropped)), patch=patch.as_diff(task))


async def _blame(
    task: Task, request: EvaluationRequest, sandboxes: AgentSandboxes, baselines: Baselines, first: Verdict
) -> Verdict:
    """Decide what broke the check: the evaluator (if the check breaks on untouched files too), chance, or the agent.
    Raises SandboxError, EvaluatorFault."""
    if isinstance(task.evaluator, PluginEvaluator):
        # Evaluators of other packages cannot score untouched files.
        return first
    untouched = await baselines.verdict(task, lambda: _score_untouched(task, sandboxes, baselines))
    if untouched.cause is Cause.EVALUATOR:
        return first
    again = await _score(task, request, sandboxes, baselines)
    if again.cause is not Cause.EVALUATOR:
        return again
    blamed = invalid(f"only the agent's files break the check: {again.detail}")
    return replace(blamed, log=again.log, patch=again.patch)


async def _score_untouched(task: Task, sandboxes: AgentSandboxes, baselines: Baselines) -> Verdict:
    """Score a task's own files. Raises SandboxError, EvaluatorFault."""
    if isinstance(task.evaluator, RepositoryEvaluator):
        return await grade(task, LeftDiff(), sandboxes, baselines, always_twins=True)
    if isinstance(task.evaluator, VerifierEvaluator):
        return await score_untouched(task, sandboxes)
    spec = task.evaluator
    assert isinstance(spec, CheckEvaluator)
    files = Patch(changes={}).applied_to(await task_files(task), spec.hidden_files)
    return await _check_files(spec, files, clean_spec(task), sandboxes)


async def _score(task: Task, request: EvaluationRequest, sandboxes: AgentSandboxes, baselines: Baselines) -> Verdict:
    """Score the agent's files once; a broken check yields cause evaluator. Raises SandboxError, EvaluatorFault."""
    match task.evaluator:
        case StateEvaluator() as spec:
            hidden = {path: text.encode() for path, text in spec.hidden_files.items()}
            return await _check_files(spec, hidden, spec_with_data(task, request), sandboxes)
        case PatchEvaluator() | CompareEvaluator() as spec:
            return await _score_patch(spec, task, request, sandboxes)
        case RepositoryEvaluator():
            return await score_repository(task, request, sandboxes, baselines)
        case VerifierEvaluator():
            return await score_verifier(task, request, sandboxes)
        case PluginEvaluator() as spec:
            return await score_by_plugin(spec, task, request, sandboxes)
        case spec:
            raise TypeError(f"the kind {spec.kind} is not scored by files")


async def _score_patch(
    spec: PatchEvaluator | CompareEvaluator, task: Task, request: EvaluationRequest, sandboxes: CleanSandboxes
) -> Verdict:
    async def collect(untouched: bool) -> Patch:
        async with sandboxes.clean(clean_spec(task) if untouched else spec_with_data(task, request)) as sandbox:
            if untouched:
                await sandbox.write_many(await task_files(task))
            return await collect_patch(task, sandbox)

    try:
        patch = await collect_twice(collect)
    except PatchRefused as error:
        return invalid(str(error))
    left = patch
    if isinstance(spec, CompareEvaluator):
        patch = patch.filtered(task, spec.test_files)
    files = patch.applied_to(await task_files(task), spec.hidden_files)
    verdict = await _check_files(spec, files, clean_spec(task), sandboxes)
    diff = left.as_diff(task) if request.keep else ""
    return replace(verdict, detail=join_details(verdict.detail, summary(patch.dropped)), patch=diff)


async def _check_files(
    spec: CheckEvaluator, files: Mapping[str, bytes], sandbox_spec: SandboxSpec, sandboxes: CleanSandboxes
) -> Verdict:
    """Run the check in a clean sandbox with these files. Raises SandboxError, EvaluatorFault."""
    async with sandboxes.clean(sandbox_spec) as sandbox:
        try:
            if files:
                with in_part(EVALUATE_APPLY):
                    await sandbox.write_many(files)
            return await run_check(spec, spec.check, sandbox)
        except ExecTimeout as error:
            return broken(f"the check exceeded {error}")
        except SandboxFileError as error:
            return broken(f"the files could not be written: {error}")
