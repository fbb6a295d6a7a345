"""Scoring a patch to a repository: filtered, applied to a clean copy, graded by the tests that the task names.

Invariants:
- Tests, hidden files and whatever puts them in place come into a sandbox that the agent never saw.
- What the filter dropped stands in the detail of every verdict.
- A verdict of cause evaluator says only that nothing was decided; `evaluation` finds out who broke it.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from headrace.actors.evaluators.collecting import LeftDiff, collect_diff
from headrace.actors.evaluators.comparison import compare
from headrace.actors.evaluators.diff_filter import Dropped, FilterRules, filter_diff, summary
from headrace.actors.evaluators.report import Report, ReportUntrusted, named, read_report
from headrace.actors.evaluators.running import RunBroken, TestRun, parse_logs, run_tests
from headrace.actors.evaluators.unified_diff import DiffRefused, parse_diff
from headrace.actors.evaluators.verdict import LABELS, Verdict, broken, failed, invalid, printed, solved, told
from headrace.actors.in_sandbox import source
from headrace.actors.preparing import ANY_OWNER, GIT, lay_out
from headrace.buffer.repositories import RepositorySpec, Swepro, TestIds, required_ids
from headrace.buffer.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, SandboxError, SandboxFileError

if TYPE_CHECKING:
    from headrace.actors.evaluators.verdict import CleanRooms, EvaluationRequest
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox

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


async def score_repository(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    """One look at what the agent left. Raises SandboxError."""
    repository = _repository_of(request.task)
    try:
        left = await collect_diff(request, repository, rooms)
    except DiffRefused as error:
        return invalid(str(error))
    except ExecTimeout as error:
        return broken(f"collecting the diff outlived {error}")
    verdict = await grade(request.task, left, rooms)
    return replace(verdict, patch=left.diff.decode(errors="replace")) if request.keep else verdict


def _repository_of(task: Task) -> RepositorySpec:
    if task.evaluator.repository is None:
        raise SandboxError(f"task {task.id}: a task of kind repository has no repository")
    return task.evaluator.repository


async def grade(task: Task, left: LeftDiff, rooms: CleanRooms) -> Verdict:
    """The verdict on a diff; an empty one is the untouched repository. Raises SandboxError."""
    dropped = list(left.notes)
    try:
        verdict = await _decide(task, left, rooms, dropped)
    except DiffRefused as error:
        verdict = invalid(str(error))
    except (RunBroken, ReportUntrusted) as error:
        verdict = broken(str(error))
    except ExecTimeout as error:
        verdict = broken(f"the tests outlived {error}")
    except SandboxFileError as error:
        verdict = broken(f"the files could not be written: {error}")
    return replace(verdict, detail=told(verdict.detail, summary(dropped)))


async def _decide(task: Task, left: LeftDiff, rooms: CleanRooms, dropped: list[Dropped]) -> Verdict:
    """Raises DiffRefused, RunBroken, ReportUntrusted, SandboxError. Whatever is filtered is added to `dropped`."""
    outcome = await _run(task, left, rooms, dropped)
    if not isinstance(outcome, TestRun):
        return outcome
    return replace(await _judge(task, outcome, rooms), log=printed(outcome.stdout, outcome.stderr))


async def _run(task: Task, left: LeftDiff, rooms: CleanRooms, dropped: list[Dropped]) -> Verdict | TestRun:
    """Apply and run: a verdict where it is already clear, else what the tests left."""
    repository, timeout_s = _repository_of(task), task.evaluator.timeout_s
    async with rooms.clean(SandboxSpec(image=task.image, labels=LABELS)) as room:
        await lay_out(task, room)
        tests = _test_files(task, repository) | await _set_up(room, repository, timeout_s)
        filtered = filter_diff(left.diff, FilterRules(test_files=tests), left.base)
        dropped += filtered.dropped
        refused = await _apply(room, repository, filtered.diff, timeout_s)
        if refused is not None:
            return refused
        if task.evaluator.hidden_files:
            await room.write_many({path: text.encode() for path, text in task.evaluator.hidden_files.items()})
        if task.evaluator.check:
            compared = await _compare(room, task, repository)
            if compared.cause is not Cause.SOLVED:
                return compared
        return await run_tests(room, repository, tests, timeout_s)


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
        f"{repository.python} -I -S - {folder}",
        stdin=source("apply").encode(),
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
        python=f"{repository.python} -B",
        timeout_s=task.evaluator.timeout_s,
        user=repository.user,
        cwd=repository.workdir,
        environment=repository.environment,
    )


async def _judge(task: Task, run: TestRun, rooms: CleanRooms) -> Verdict:
    """Raises ReportUntrusted, RunBroken, SandboxError."""
    grader = _repository_of(task).grader
    if isinstance(grader, Swepro):
        return await _judge_logs(task, grader, run, rooms)
    report = _report_of(run)
    if isinstance(grader, TestIds):
        return _missing(report.not_passed(required_ids(grader)), len(required_ids(grader)))
    return await _judge_all(task, report, rooms)


def _report_of(run: TestRun) -> Report:
    """Raises ReportUntrusted, with the end of what the run printed."""
    try:
        return read_report(run.sessions)
    except ReportUntrusted as error:
        raise ReportUntrusted(f"{error}: {(run.stdout + run.stderr)[-300:].strip()}") from error


def _missing(missing: tuple[str, ...], count: int) -> Verdict:
    return failed(f"{len(missing)} of {count} tests did not pass: {named(missing)}") if missing else solved()


async def _judge_logs(task: Task, grader: Swepro, run: TestRun, rooms: CleanRooms) -> Verdict:
    """The parser decides; where the script ran pytest, its report must be sound and must not contradict."""
    report = _report_of(run) if run.sessions else None
    async with rooms.clean(SandboxSpec(image=task.image, labels=LABELS)) as room:
        passed = await parse_logs(room, _repository_of(task), grader, run)
    required = required_ids(grader)
    known = [name for name in required if report is not None and name in report.results]
    denied = set(report.not_passed(known)) if report is not None else set()
    return _missing(tuple(name for name in required if name not in passed or name in denied), len(required))


async def _judge_all(task: Task, report: Report, rooms: CleanRooms) -> Verdict:
    """Nothing failed, something passed, and nothing is skipped that runs on the untouched repository."""
    if report.any_failed():
        return failed(f"failed: {named(report.any_failed())}")
    if not report.results:
        return failed("no test ran")
    if report.skipped:
        new = sorted(report.skipped - await _skipped_untouched(task, rooms))
        if new or report.skipped >= report.results.keys():
            return failed(f"skipped: {named(new or report.skipped)}")
    return solved()


async def _skipped_untouched(task: Task, rooms: CleanRooms) -> frozenset[str]:
    """What the tests skip without any patch. Raises ReportUntrusted, RunBroken, SandboxError."""
    outcome = await _run(task, LeftDiff(), rooms, [])
    return _report_of(outcome).skipped if isinstance(outcome, TestRun) else frozenset()
