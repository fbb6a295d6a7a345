"""Scoring a patch to a repository: filtered, applied to a clean copy, graded by the tests that the task names.

Invariants:
- Tests, hidden files and whatever puts them in place come into a sandbox that the agent never saw.
- What the filter dropped stands in the detail of every verdict.
- Nothing is solved by one run: the tests that passed run once more as twins, on a copy of their own (see
  `in_sandbox.canary_plugin`).
- A verdict of cause evaluator says only that nothing was decided; `evaluation` finds out who broke it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace.actors.evaluation.comparison import compare
from headrace.actors.evaluation.diff_filter import Dropped, FilterRules, filter_diff, summary
from headrace.actors.evaluation.patch_collection import LeftDiff, collect_diff
from headrace.actors.evaluation.preparation import ANY_OWNER, GIT, lay_out
from headrace.actors.evaluation.report import (
    Report,
    ReportUntrusted,
    believe,
    excused_twins,
    missing_beside,
    named,
    read_report,
    without_twin,
)
from headrace.actors.evaluation.test_runner import RunBroken, TestRun, parse_logs, run_tests
from headrace.actors.evaluation.unified_diff import DiffRefused, parse_diff
from headrace.actors.evaluation.verdict import LABELS, Verdict, broken, failed, invalid, printed, solved, told
from headrace.actors.in_sandbox import program_command
from headrace.buffer.repositories import RepositorySpec, Swepro, TestIds, required_ids
from headrace.buffer.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, SandboxError, SandboxFileError

if TYPE_CHECKING:
    from headrace.actors.evaluation.baselines import Baselines
    from headrace.actors.evaluation.verdict import CleanSandboxes, EvaluationRequest
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox

REPOSITORY_RUNS: Final = 4
"""Steps of one evaluation that may each take `evaluator.timeout_s`: the diff, the tests, their twins, and once a task
the untouched repository."""
_AGENT_REFUSED: Final = 10
_CHANGED: Final = f"""
changed() {{ {GIT} diff --name-only -z "$1"; {GIT} ls-files -z --others --exclude-standard; }}
head=$({GIT} rev-parse HEAD) || exit 1
changed "$head" | sort -z > "$1/before"
( set -e; . "$1/set-up" ) > "$1/log" 2>&1 || {{ tail -c 300 "$1/log" >&2; exit 1; }}
changed "$head" | sort -z > "$1/after"
comm -z -13 "$1/before" "$1/after"
"""
"""Prints the paths that the set-up changed: these are the tests."""


async def score_repository(request: EvaluationRequest, rooms: CleanSandboxes, baselines: Baselines) -> Verdict:
    """One look at what the agent left. Raises SandboxError."""
    repository = _repository_of(request.task)
    try:
        left = await collect_diff(request, repository, rooms)
    except DiffRefused as error:
        return invalid(str(error))
    except ExecTimeout as error:
        return broken(f"collecting the diff outlived {error}")
    verdict = await grade(request.task, left, rooms, baselines)
    return replace(verdict, patch=left.diff.decode(errors="replace")) if request.keep else verdict


def _repository_of(task: Task) -> RepositorySpec:
    if task.evaluator.repository is None:
        raise SandboxError(f"task {task.id}: a task of kind repository has no repository")
    return task.evaluator.repository


async def grade(
    task: Task, left: LeftDiff, rooms: CleanSandboxes, baselines: Baselines, *, always_twins: bool = False
) -> Verdict:
    """The verdict on a diff; an empty one is the untouched repository. `always_twins`: look whether twins can run too
    where the tests did not pass. Raises SandboxError."""
    grading = _Grading(task, left, rooms, baselines)
    try:
        verdict = await grading.decide(always_twins=always_twins)
    except DiffRefused as error:
        verdict = invalid(str(error))
    except (RunBroken, ReportUntrusted) as error:
        verdict = broken(str(error))
    except ExecTimeout as error:
        verdict = broken(f"the tests outlived {error}")
    except SandboxFileError as error:
        verdict = broken(f"the files could not be written: {error}")
    return replace(verdict, detail=told(verdict.detail, summary([*left.notes, *grading.dropped])))


@dataclass(frozen=True, slots=True)
class _Passed:
    """What a first run solves if the twins confirm the tests that it needed."""

    tests: tuple[str, ...]


@dataclass(slots=True)
class _Grading:
    """One diff on its way to a verdict; `dropped` is what the filter dropped. Everything here raises DiffRefused,
    RunBroken, ReportUntrusted, SandboxError."""

    task: Task
    left: LeftDiff
    rooms: CleanSandboxes
    baselines: Baselines
    dropped: tuple[Dropped, ...] = ()

    async def decide(self, *, always_twins: bool) -> Verdict:
        """Run, judge, and confirm by twins what would be solved."""
        outcome, self.dropped = await _run(self.task, self.left, self.rooms)
        if not isinstance(outcome, TestRun):
            return outcome
        judged = await self._judge(outcome)
        if isinstance(judged, _Passed):
            verdict = await self._confirm(judged.tests)
        else:
            verdict = judged
            if always_twins:
                await self._twins()
        return replace(verdict, log=printed(outcome.stdout, outcome.stderr))

    async def _judge(self, run: TestRun) -> _Passed | Verdict:
        grader = _repository_of(self.task).grader
        if isinstance(grader, Swepro):
            return await self._judge_logs(grader, run)
        report = _report_of(run)
        return await (self._judge_ids(grader, report) if isinstance(grader, TestIds) else self._judge_all(report))

    async def _judge_ids(self, grader: TestIds, report: Report) -> _Passed | Verdict:
        required = required_ids(grader)
        missing = report.not_passed(required)
        if missing and not report.not_passed(required, excused=report.having("xfailed")):
            missing = report.not_passed(required, excused=(await self._untouched()).having("xfailed"))
        if missing:
            return _missing(missing, len(required))
        ids = (test_id for ids in report.standing_for(required).values() for test_id in ids)
        return _Passed(tuple(test_id for test_id in ids if "passed" in report.results[test_id]))

    async def _judge_logs(self, grader: Swepro, run: TestRun) -> _Passed | Verdict:
        """The parser decides; where the script ran pytest, its report must be sound and must not contradict."""
        report = _report_of(run) if run.sessions or run.intruded else Report(results={}, uncollected={})
        async with self.rooms.clean(SandboxSpec(image=self.task.image, labels=LABELS)) as room:
            parsed = await parse_logs(room, _repository_of(self.task), grader, run)
        required = required_ids(grader)
        known = [name for name in required if name in report.results]
        denied = set(report.not_passed(known))
        missing = tuple(name for name in required if name not in parsed or name in denied)
        return _missing(missing, len(required)) if missing else _Passed(tuple(known))

    async def _judge_all(self, report: Report) -> _Passed | Verdict:
        """Something passed, nothing failed, and what the untouched repository runs ran and was not skipped."""
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
        return _Passed(passed) if passed else failed(f"none passed of {named(sorted(report.results))}")

    async def _confirm(self, passed: tuple[str, ...]) -> Verdict:
        """What passed must end in our exception when it runs as a twin."""
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
        return solved(f"counted without a twin, as the untouched repository has none either: {named(doubted)}")

    async def _twins(self) -> Report:
        outcome, _ = await _run(self.task, self.left, self.rooms, twins=True)
        if not isinstance(outcome, TestRun):
            raise RunBroken(f"the patch could be applied only once: {outcome.detail}")
        return _report_of(outcome)

    async def _untouched(self) -> Report:
        return await self.baselines.of(self.task, partial(_measure_untouched, self.task, self.rooms))


async def _measure_untouched(task: Task, rooms: CleanSandboxes) -> Report:
    """What the tests do without any patch, as twins. Where they end or hold up the session, which the patch may be
    there to mend, it is what they reported until then. Raises RunBroken, SandboxError."""
    outcome, _ = await _run(task, LeftDiff(), rooms, twins=True, cut=True)
    return believe(outcome.sessions if isinstance(outcome, TestRun) else ())


async def _run(
    task: Task, left: LeftDiff, rooms: CleanSandboxes, *, twins: bool = False, cut: bool = False
) -> tuple[Verdict | TestRun, tuple[Dropped, ...]]:
    """Apply and run in a clean sandbox: a verdict where it is already clear, else what the tests (or their twins) left;
    and what the filter dropped. Raises DiffRefused, RunBroken, SandboxError."""
    repository, timeout_s = _repository_of(task), task.evaluator.timeout_s
    async with rooms.clean(SandboxSpec(image=task.image, labels=LABELS)) as room:
        await lay_out(task, room)
        tests = _test_files(task, repository) | await _set_up(room, repository, timeout_s)
        filtered = filter_diff(left.diff, FilterRules(test_files=tests), left.base)
        refused = await _apply(room, repository, filtered.diff, timeout_s)
        if refused is not None:
            return refused, filtered.dropped
        if task.evaluator.hidden_files:
            await room.write_many({path: text.encode() for path, text in task.evaluator.hidden_files.items()})
        if task.evaluator.check and not twins:
            compared = await _compare(room, task, repository)
            if compared.cause is not Cause.SOLVED:
                return compared, filtered.dropped
        return await run_tests(room, repository, tests, timeout_s, twins=twins, cut=cut), filtered.dropped


def _test_files(task: Task, repository: RepositorySpec) -> frozenset[str]:
    """Paths in the repository that the task itself says are tests."""
    grader = repository.grader
    paths = set(repository.test_files)
    if isinstance(grader, TestIds):
        paths |= {test_id.split("::")[0] for test_id in required_ids(grader)}
        try:
            paths |= {path for file in parse_diff(grader.test_patch.encode()) for path in file.paths}
        except DiffRefused as error:
            raise RunBroken(f"the task's own test patch is no diff: {error}") from error
    if isinstance(grader, Swepro):
        paths |= {name for name in grader.selected_test_files if not name.startswith("/")}
    inside = repository.workdir + "/"
    return frozenset(
        paths | {path.removeprefix(inside) for path in task.evaluator.hidden_files if path.startswith(inside)}
    )


async def _set_up(room: Sandbox, repository: RepositorySpec, timeout_s: float) -> frozenset[str]:
    """Let the grader's command put the tests in place, and tell which files those are. Raises RunBroken."""
    grader = repository.grader
    if not isinstance(grader, Swepro) or not grader.before_repo_set_cmd:
        return frozenset()
    folder = f"/opt/{secrets.token_hex(8)}"
    await room.write(f"{folder}/set-up", grader.before_repo_set_cmd.encode())
    command = f"set -- {folder}\n{_CHANGED}"
    result = await room.exec(command, env=ANY_OWNER, cwd=repository.workdir, timeout_s=timeout_s)
    if result.exit_code != 0 or result.truncated:
        raise RunBroken(f"before_repo_set_cmd ended with {result.exit_code}: {result.stderr[-200:]!r}")
    return frozenset(result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1])


async def _apply(room: Sandbox, repository: RepositorySpec, diff: bytes, timeout_s: float) -> Verdict | None:
    """Apply the agent's part, then the task's tests; None when both are in. Raises RunBroken."""
    grader = repository.grader
    test_patch = grader.test_patch if isinstance(grader, TestIds) else ""
    if not diff and not test_patch:
        return None
    folder = f"/opt/{secrets.token_hex(8)}"
    await room.write_many({f"{folder}/agent.diff": diff, f"{folder}/tests.diff": test_patch.encode()})
    result = await room.exec(
        program_command(repository.python, "apply", folder),
        cwd=repository.workdir,
        timeout_s=timeout_s,
    )
    if result.exit_code == _AGENT_REFUSED:
        return invalid(f"the patch does not apply: {result.stderr[-200:].decode(errors='replace').strip()}")
    if result.exit_code != 0:
        raise RunBroken(f"the task's own test patch does not apply ({result.exit_code}): {result.stderr[-200:]!r}")
    return None


async def _compare(room: Sandbox, task: Task, repository: RepositorySpec) -> Verdict:
    return await compare(
        room,
        task.evaluator.check,
        task.evaluator.expected,
        python=repository.python,
        options="-B",
        timeout_s=task.evaluator.timeout_s,
        user=repository.user,
        cwd=repository.workdir,
        environment=repository.environment,
    )


def _report_of(run: TestRun) -> Report:
    """Raises ReportUntrusted, with the end of what the run printed."""
    try:
        if run.intruded:
            raise ReportUntrusted("a process of a session tried to begin another one")
        return read_report(run.sessions)
    except ReportUntrusted as error:
        raise ReportUntrusted(f"{error}: {(run.stdout + run.stderr)[-300:].strip()}") from error


def _missing(missing: tuple[str, ...], count: int) -> Verdict:
    return failed(f"{len(missing)} of {count} tests did not pass: {named(missing)}")
