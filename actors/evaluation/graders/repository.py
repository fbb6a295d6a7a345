"""The grader of patches to repositories, which filters a patch, applies it to a clean copy and runs the task's tests.

Invariants:
- Tests, hidden files and set-up commands are only ever used in a sandbox that the agent never had access to.
- The detail of every verdict lists the changes that the filter dropped.
- A single run never counts as a solution: the passed tests run once more as twins, on another copy (see
  `in_sandbox.canary_plugin`).
- A verdict with cause evaluator means that nothing was decided; `evaluation` determines who broke the check.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.comparison import compare
from headrace.actors.evaluation.graders.diff_filter import Dropped, FilterRules, filter_diff, reason_for_path, summary
from headrace.actors.evaluation.graders.history import ANY_OWNER, GIT, lay_out
from headrace.actors.evaluation.graders.patch_collection import LeftDiff, collect_diff
from headrace.actors.evaluation.graders.report import (
    Report,
    ReportUntrusted,
    excused_twins,
    keeps,
    merge_sessions,
    missing_beside,
    named,
    read_report,
    without_twin,
)
from headrace.actors.evaluation.graders.test_runner import RunBroken, TestRun, parse_logs, run_tests
from headrace.actors.evaluation.graders.verdict import (
    CleanSandboxes,
    EvaluationRequest,
    PatchRefused,
    Verdict,
    broken,
    clean_spec,
    failed,
    invalid,
    join_details,
    printed,
    solved,
)
from headrace.actors.evaluation.in_sandbox import program_command
from headrace.actors.record.files.parts import in_part
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.repositories import EvalCommand, RepositorySpec, Swepro, TestIds, required_ids
from headrace.buffer.tasks.task import Task
from headrace.buffer.tasks.unified_diff import DiffRefused, parse_diff, with_last_line_end
from headrace.buffer.trajectories.breakdown import EVALUATE_APPLY
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import ExecTimeout, SandboxError, SandboxFileError

REPOSITORY_RUNS: Final = 4
"""Number of steps in one evaluation that may each take `evaluator.timeout_s`: the diff, the tests, their twins, and,
once per task, the untouched repository."""
_AGENT_REFUSED: Final = 10
_CHANGED: Final = f"""
changed() {{ {GIT} diff --name-only -z "$1"; {GIT} ls-files -z --others --exclude-standard; }}
head=$({GIT} rev-parse HEAD) || exit 1
changed "$head" | sort -z > "$1/before"
( set -e; . "$1/set-up" ) > "$1/log" 2>&1 || {{ tail -c 300 "$1/log" >&2; exit 1; }}
changed "$head" | sort -z > "$1/after"
comm -z -13 "$1/before" "$1/after"
"""
"""Shell script that runs the set-up command and prints the paths that it changed, all of which count as tests."""


async def score_repository(
    task: Task, request: EvaluationRequest, sandboxes: CleanSandboxes, baselines: Baselines
) -> Verdict:
    """Score an agent's repository once. Raises SandboxError."""
    try:
        left = await collect_diff(_spec_of(task), task, request, sandboxes)
    except PatchRefused as error:
        return invalid(str(error))
    verdict = await grade(task, left, sandboxes, baselines)
    return replace(verdict, patch=left.diff.decode(errors="replace")) if request.keep else verdict


def _spec_of(task: Task) -> RepositoryEvaluator:
    assert isinstance(task.evaluator, RepositoryEvaluator)
    return task.evaluator


async def grade(
    task: Task, left: LeftDiff, sandboxes: CleanSandboxes, baselines: Baselines, *, always_twins: bool = False
) -> Verdict:
    """Return the verdict on a diff; an empty one grades the untouched repository. With `always_twins`, the twins run
    even if the tests did not pass. Raises SandboxError."""
    grading = _Grading(task, left, sandboxes, baselines)
    try:
        verdict = await grading.decide(always_twins=always_twins)
    except DiffRefused as error:
        verdict = invalid(str(error))
    except (RunBroken, ReportUntrusted) as error:
        verdict = broken(str(error))
    except ExecTimeout as error:
        verdict = broken(f"the tests exceeded {error}")
    except SandboxFileError as error:
        verdict = broken(f"the files could not be written: {error}")
    return replace(verdict, detail=join_details(verdict.detail, summary([*left.notes, *grading.dropped])))


@dataclass(frozen=True, slots=True)
class _Passed:
    """The tests that passed in the first run and must be confirmed by their twins. `note` is for the verdict."""

    tests: tuple[str, ...]
    note: str = ""


@dataclass(slots=True)
class _Grading:
    """Grading of one diff; `dropped` lists the changes that the filter dropped. All methods raise DiffRefused,
    RunBroken, ReportUntrusted, SandboxError."""

    task: Task
    left: LeftDiff
    sandboxes: CleanSandboxes
    baselines: Baselines
    dropped: tuple[Dropped, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    """What the tests of the first run were called with."""

    async def decide(self, *, always_twins: bool) -> Verdict:
        """Run the tests, judge their report, and confirm a passing report with twins."""
        outcome, self.dropped = await _run(self.task, self.left, self.sandboxes)
        if not isinstance(outcome, TestRun):
            return outcome
        if outcome.cut:
            return await self._judge_cut(outcome)
        self.parameters = merge_sessions(outcome.sessions).parameters
        grader = _spec_of(self.task).repository.grader
        if isinstance(grader, Swepro):
            judged = await self._judge_logs(grader, outcome)
        elif isinstance(grader, TestIds):
            report, required = _report_of(outcome), required_ids(grader)
            missing = report.not_passed(required)
            if missing and not report.not_passed(required, excused=report.having("xfailed")):
                missing = report.not_passed(required, excused=(await self._untouched()).having("xfailed"))
            ids = (test_id for found in report.standing_for(required).values() for test_id in found)
            judged = (
                _missing(missing, len(required))
                if missing
                else _Passed(tuple(test_id for test_id in ids if "passed" in report.results[test_id]))
            )
        elif isinstance(grader, EvalCommand):
            judged = await self._judge_command(outcome)
        else:
            judged = await self._judge_all(_report_of(outcome))
        if isinstance(judged, _Passed) and (changed := await self._changed_parameters(judged.tests)):
            judged = failed(f"the patch changes what is tested: {named(changed)}")
        if isinstance(judged, _Passed):
            verdict = await self._confirm(judged.tests)
            verdict = replace(verdict, detail=join_details(verdict.detail, judged.note))
        else:
            verdict = judged
            if always_twins:
                await self._twins()
        return replace(verdict, log=printed(outcome.stdout, outcome.stderr))

    async def _judge_cut(self, run: TestRun) -> Verdict:
        """Judge tests that were stopped at the timeout. The untouched repository may hang too, where that is what a
        patch should mend: then the same place is a failure, and another one may be a slow host's."""
        timeout = f"timeout_s={_spec_of(self.task).timeout_s:g}"
        untouched = await self._untouched()
        if untouched.cut and merge_sessions(run.sessions).results.keys() == untouched.results.keys():
            return failed(f"the tests exceeded {timeout} where those of the untouched repository do")
        raise RunBroken(f"the tests exceeded {timeout}")

    async def _judge_logs(self, grader: Swepro, run: TestRun) -> _Passed | Verdict:
        """Judge with the task's log parser. If the script runs pytest in the untouched repository, it must do so here,
        and its report must be valid, have the same tests and agree with the logs, which the code under test can
        forge."""
        report = _report_of(run) if run.sessions or run.intruded else Report(results={}, uncollected={})
        async with self.sandboxes.clean(clean_spec(self.task)) as sandbox:
            parsed = await parse_logs(sandbox, _spec_of(self.task).repository, grader, run)
        required = required_ids(grader)
        known = [name for name in required if name in report.results]
        denied = set(report.not_passed(known))
        missing = tuple(name for name in required if name not in parsed or name in denied)
        if missing or len(known) == len(required):
            return _missing(missing, len(required)) if missing else _Passed(tuple(known))
        untouched = await self._untouched()
        if not run.sessions and (untouched.collected or untouched.named):
            raise ReportUntrusted("no pytest session started, although one does in the untouched repository")
        unreported = [name for name in required if name not in report.results]
        lost = set(missing_beside(report, untouched))
        if absent := tuple(name for name in unreported if name in lost or name.split("[")[0] in lost):
            return failed(f"in the log, but not run by pytest: {named(absent)}")
        note = f"by the log alone, which the code under test can forge: {named(unreported)}"
        return _Passed(tuple(known), note)

    async def _judge_command(self, run: TestRun) -> _Passed | Verdict:
        """Require exit code 0, and of a command that runs pytest (here or in the untouched repository) the report
        too."""
        if run.exit_code != 0:
            output = (run.stdout + run.stderr)[-200:].strip()
            return failed(f"the command ended with exit code {run.exit_code}: {output}")
        if run.sessions or run.intruded:
            return await self._judge_all(_report_of(run))
        if (await self._untouched()).sessions:
            raise ReportUntrusted("no pytest session started, although one does in the untouched repository")
        return _Passed((), "by the exit code alone: the command runs no pytest")

    async def _changed_parameters(self, passed: tuple[str, ...]) -> tuple[str, ...]:
        """Return the passed tests that are called with other values than in the untouched repository."""
        if not any(test_id in self.parameters for test_id in passed):
            return ()
        before = (await self._untouched()).parameters
        return tuple(
            test_id for test_id in passed if not keeps(before.get(test_id, ""), self.parameters.get(test_id, ""))
        )

    async def _judge_all(self, report: Report) -> _Passed | Verdict:
        """Require that at least one test passed, none failed, and all tests of the untouched repository ran without new
        skips."""
        if report.any_failed():
            return failed(f"failed: {named(report.any_failed())}")
        if not report.results:
            return failed("no test ran")
        base = await self._untouched()
        excuses = (
            ("skipped", report.skipped - base.skipped),
            ("xfailed", report.having("xfailed") - base.having("xfailed")),
            ("did not run", missing_beside(report, base)),
        )
        for what, ids in excuses:
            if ids:
                return failed(f"{what}: {named(sorted(ids))}")
        passed = tuple(sorted(report.having("passed")))
        return _Passed(passed) if passed else failed(f"no test passed; ran {named(sorted(report.results))}")

    async def _confirm(self, passed: tuple[str, ...]) -> Verdict:
        """Require that every passed test ends with the canary exception when it runs as a twin."""
        if not passed:
            return solved()
        doubted = without_twin(passed, await self._twins())
        if not doubted:
            return solved()
        excused = excused_twins(await self._untouched())
        refused = [test_id for test_id in doubted if test_id not in excused]
        if refused:
            return failed(
                f"{len(refused)} of {len(passed)} tests passed, but did not reach the end of their twins: "
                f"{named(refused)}"
            )
        return solved(f"counted without a twin, since the untouched repository has none either: {named(doubted)}")

    async def _twins(self) -> Report:
        outcome, _ = await _run(self.task, self.left, self.sandboxes, twins=True)
        if not isinstance(outcome, TestRun):
            raise RunBroken(f"the patch applied to the first copy but not to the second: {outcome.detail}")
        if outcome.cut:
            raise RunBroken(f"the twins of the tests exceeded timeout_s={_spec_of(self.task).timeout_s:g}")
        return _report_of(outcome)

    async def _untouched(self) -> Report:
        return await self.baselines.report(self.task, partial(_measure_untouched, self.task, self.sandboxes))


async def _measure_untouched(task: Task, sandboxes: CleanSandboxes) -> Report:
    """Run the twins of the tests without a patch. If they terminate or block the session (which the patch may fix), the
    report has the results so far. Raises RunBroken, SandboxError."""
    outcome, _ = await _run(task, LeftDiff(), sandboxes, twins=True)
    if not isinstance(outcome, TestRun):
        return merge_sessions(())
    return replace(merge_sessions(outcome.sessions), cut=outcome.cut)


async def _run(
    task: Task, left: LeftDiff, sandboxes: CleanSandboxes, *, twins: bool = False
) -> tuple[Verdict | TestRun, tuple[Dropped, ...]]:
    """Apply a diff and run the tests (or their twins) in a clean sandbox. Return the dropped changes together with the
    test run, or with a verdict if one is reached before the tests run. Raises DiffRefused, RunBroken, SandboxError."""
    spec = _spec_of(task)
    repository, timeout_s = spec.repository, spec.timeout_s
    async with sandboxes.clean(clean_spec(task)) as sandbox:
        with in_part(EVALUATE_APPLY):
            await lay_out(task, sandbox)
        tests = _named_tests(task, repository)
        grader = repository.grader
        if isinstance(grader, Swepro) and grader.before_repo_set_cmd:
            # The command writes the tests, so every path that it changes is one.
            folder = f"/opt/{secrets.token_hex(8)}"
            await sandbox.write(f"{folder}/set-up", grader.before_repo_set_cmd.encode())
            command = f"set -- {folder}\n{_CHANGED}"
            result = await sandbox.exec(command, env=ANY_OWNER, cwd=repository.workdir, timeout_s=timeout_s)
            if result.exit_code != 0 or result.truncated:
                code = result.exit_code
                raise RunBroken(f"before_repo_set_cmd failed with exit code {code}: {result.stderr[-200:]!r}")
            tests |= set(result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1])
        try:
            touched = {path for file in parse_diff(left.diff) for path in file.paths}
            support = await _test_support(sandbox, task, touched, tests)
            filtered = filter_diff(left.diff, FilterRules(test_files=tests | support, new_names=True), left.base)
        except (DiffRefused, RunBroken, SandboxError):
            raise
        except Exception as error:
            # Only a patch can break the filter, and must not escape a verdict by that.
            raise RunBroken(f"the patch could not be filtered: {error!r}") from error
        with in_part(EVALUATE_APPLY):
            refused = await _apply(sandbox, repository, filtered.diff, timeout_s)
        if refused is not None:
            return refused, filtered.dropped
        if spec.hidden_files:
            with in_part(EVALUATE_APPLY):
                await sandbox.write_many({path: text.encode() for path, text in spec.hidden_files.items()})
        if spec.check and not twins:
            compared = await compare(
                sandbox,
                spec.check,
                spec.expected,
                python=repository.python,
                options="-B",
                timeout_s=timeout_s,
                user=repository.user,
                cwd=repository.workdir,
                environment=repository.environment,
            )
            if compared.cause is not Cause.SOLVED:
                return compared, filtered.dropped
        run = await run_tests(
            sandbox, repository, tests | support, timeout_s, uncollected=filtered.uncollected, twins=twins
        )
        return run, filtered.dropped


async def _test_support(
    sandbox: Sandbox, task: Task, touched: Collection[str], tests: Collection[str]
) -> frozenset[str]:
    """Return those of a patch's paths that serve the tests of the pristine repository (see `in_sandbox.test_support`).
    Raises RunBroken, SandboxError."""
    repository = _spec_of(task).repository
    paths = sorted(path for path in touched if reason_for_path(path, frozenset(tests), new=True) is None)
    if not paths:
        return frozenset()
    given = {"workdir": repository.workdir, "paths": paths, "tests": sorted(tests), "hidden": _hidden(task)}
    with in_part(EVALUATE_APPLY):
        result = await sandbox.exec(
            program_command(repository.python, "test_support"),
            stdin=json.dumps(given).encode(),
            cwd="/",
            timeout_s=_spec_of(task).timeout_s,
        )
    if result.exit_code != 0:
        raise RunBroken(f"looking for the files of the tests failed ({result.exit_code}): {result.stderr[-200:]!r}")
    return frozenset(json.loads(result.stdout))


def _hidden(task: Task) -> dict[str, str]:
    """Return the hidden files in the repository by their path there."""
    spec = _spec_of(task)
    inside = spec.repository.workdir + "/"
    files = spec.hidden_files.items()
    return {path.removeprefix(inside): text for path, text in files if path.startswith(inside)}


def _named_tests(task: Task, repository: RepositorySpec) -> frozenset[str]:
    """Return the repository paths that the task declares as tests."""
    grader = repository.grader
    paths = set(repository.test_files)
    if isinstance(grader, TestIds):
        paths |= {test_id.split("::")[0] for test_id in required_ids(grader)}
        try:
            paths |= {path for file in parse_diff(grader.test_patch.encode()) for path in file.paths}
        except DiffRefused as error:
            raise RunBroken(f"the test patch of the task is not a diff: {error}") from error
    if isinstance(grader, Swepro):
        paths |= {name for name in grader.selected_test_files if not name.startswith("/")}
    return frozenset(paths | _hidden(task).keys())


async def _apply(sandbox: Sandbox, repository: RepositorySpec, diff: bytes, timeout_s: float) -> Verdict | None:
    """Apply the agent's diff, then the task's test patch. Returns None on success, otherwise a verdict. Raises
    RunBroken."""
    grader = repository.grader
    test_patch = grader.test_patch if isinstance(grader, TestIds) else ""
    if not diff and not test_patch:
        return None
    folder, tests = f"/opt/{secrets.token_hex(8)}", with_last_line_end(test_patch).encode()
    await sandbox.write_many({f"{folder}/agent.diff": diff, f"{folder}/tests.diff": tests})
    result = await sandbox.exec(
        program_command(repository.python, "apply", folder), cwd=repository.workdir, timeout_s=timeout_s
    )
    if result.exit_code == _AGENT_REFUSED:
        return invalid(f"the patch does not apply: {result.stderr[-200:].decode(errors='replace').strip()}")
    if result.exit_code != 0:
        raise RunBroken(f"the test patch of the task does not apply ({result.exit_code}): {result.stderr[-200:]!r}")
    return None


def _report_of(run: TestRun) -> Report:
    """Return the validated report of a run. Raises ReportUntrusted, whose message includes the end of the output."""
    try:
        if run.intruded:
            raise ReportUntrusted("a process of a session tried to start another session")
        return read_report(run.sessions)
    except ReportUntrusted as error:
        raise ReportUntrusted(f"{error}: {(run.stdout + run.stderr)[-300:].strip()}") from error


def _missing(missing: tuple[str, ...], count: int) -> Verdict:
    return failed(f"{len(missing)} of {count} tests did not pass: {named(missing)}")
