"""Reports of test runs: their validity, and the results of required tests. All functions are pure.

Invariants:
- A report is valid only if every started session ended and every canary had its expected result.
- A test whose id is missing did not pass. Exit codes are ignored.
- A passed test counts only if its twin ended with the canary exception. A test is excused only by the untouched
  repository: from passing if it is xfailed there too, and from having a twin if it has none there either.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MAX_NAMED: Final = 5


class ReportUntrusted(Exception):
    """A run's report is not valid; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSession:
    """One pytest session as recorded by the monitor: the names of its canaries, and (event, id, result) records."""

    must_pass: str
    must_fail: str
    ended: bool
    records: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results by test id, one for every time the test ran. `uncollected` has the modules that failed to import or were
    skipped as a whole, and `named` the test functions in the source of modules that failed to import. Only twin
    sessions report `collected` (all tests) and `untwinned` (tests that cannot have a twin)."""

    results: Mapping[str, frozenset[str]]
    uncollected: Mapping[str, str]
    named: frozenset[str] = frozenset()
    collected: frozenset[str] = frozenset()
    untwinned: frozenset[str] = frozenset()
    parameters: Mapping[str, str] = field(default_factory=dict)
    """What a test with parameters is called with (see `in_sandbox.canary_plugin`)."""
    sessions: int = 0
    """Number of sessions that started."""
    cut: bool = False
    """True if the tests were stopped at the timeout."""

    @property
    def skipped(self) -> frozenset[str]:
        """Ids and modules that were skipped."""
        return self.having("skipped") | {name for name, result in self.uncollected.items() if result == "skipped"}

    def having(self, result: str) -> frozenset[str]:
        """Return the ids of tests that had this result at least once."""
        return frozenset(test_id for test_id, results in self.results.items() if result in results)

    def only(self, result: str) -> frozenset[str]:
        """Return the ids of tests that had only this result."""
        return frozenset(test_id for test_id, results in self.results.items() if results == {result})

    def standing_for(self, required: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Map each required id to ids in this report: the id itself, or all ids that are equal to it up to the first
        space."""
        by_cut: dict[str, list[str]] = defaultdict(list)
        for test_id in self.results:
            by_cut[test_id.split(" ")[0]].append(test_id)
        return {
            test_id: (test_id,) if test_id in self.results else tuple(by_cut.get(test_id, ())) for test_id in required
        }

    def not_passed(self, required: Iterable[str], excused: Collection[str] = ()) -> tuple[str, ...]:
        """Return the ids of required tests that did not pass, in order. Tests in `excused` may be xfailed."""

        def passed(test_id: str) -> bool:
            return self.results[test_id] <= ({"passed", "xfailed"} if test_id in excused else {"passed"})

        return tuple(
            test_id for test_id, ids in self.standing_for(required).items() if not ids or not all(map(passed, ids))
        )

    def any_failed(self) -> tuple[str, ...]:
        """Return the failed tests and modules, sorted."""
        modules = {name for name, result in self.uncollected.items() if result != "skipped"}
        return tuple(sorted(self.having("failed") | modules))


def keeps(untouched: str, patched: str) -> bool:
    """Return whether a test is called with the same values as before. Objects may have more attributes."""
    if not untouched or untouched == patched:
        return True
    try:
        return _same_or_more(json.loads(untouched), json.loads(patched))
    except (ValueError, RecursionError):
        return False


def _same_or_more(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and _same_or_more(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(map(_same_or_more, before, after))
    return bool(before == after)


def missing_beside(report: Report, untouched: Report) -> tuple[str, ...]:
    """Return the tests of the untouched repository that did not run in this report, sorted."""
    functions = {test_id.split("[")[0] for test_id in report.results}
    return tuple(sorted((untouched.collected - report.results.keys()) | (untouched.named - functions)))


def without_twin(passed: Iterable[str], twins: Report) -> tuple[str, ...]:
    """Return the ids of passed tests whose twins did not end with the canary exception, in order."""
    confirmed = twins.only("twin")
    return tuple(test_id for test_id in passed if test_id not in confirmed)


def excused_twins(untouched: Report) -> frozenset[str]:
    """Return the tests that cannot have a twin: those reported as such, and those whose twin passes in the untouched
    repository (because a plugin's test item runs a different function body)."""
    return untouched.untwinned | untouched.only("passed")


def read_report(sessions: Sequence[PytestSession]) -> Report:
    """Validate the sessions and return their report. Raises ReportUntrusted."""
    if not sessions:
        raise ReportUntrusted("no pytest session started")
    for session in sessions:
        if not session.ended:
            raise ReportUntrusted("a pytest session did not end")
        for name, wanted in ((session.must_pass, "passed"), (session.must_fail, "failed")):
            found = {result for _, test_id, result in session.records if test_id.endswith(f"::test_{name}")}
            if not found:
                raise ReportUntrusted(f"the canary that must be reported as {wanted} did not run")
            if found != {wanted}:
                raise ReportUntrusted(
                    f"a canary that must be reported as {wanted} was reported as {', '.join(sorted(found))}"
                )
    return merge_sessions(sessions)


def merge_sessions(sessions: Sequence[PytestSession]) -> Report:
    """Merge sessions without validation; used for unpatched code, whose tests may terminate the session."""
    results: dict[str, set[str]] = defaultdict(set)
    uncollected: dict[str, str] = {}
    parameters: dict[str, str] = {}
    found: dict[str, set[str]] = {"named": set(), "collected": set(), "untwinned": set()}
    for session in sessions:
        for event, test_id, result in session.records:
            canaries = (f"test_{session.must_pass}", f"test_{session.must_fail}")
            if event == "test" and test_id.rsplit("::", 1)[-1] not in canaries:
                results[test_id].add(result)
            elif event == "collect":
                uncollected[test_id] = result
            elif event == "parameters":
                parameters[test_id] = result
            elif event in found:
                found[event].add(test_id)
    return Report(
        results={test_id: frozenset(ends) for test_id, ends in results.items()},
        uncollected=uncollected,
        parameters=parameters,
        sessions=len(sessions),
        named=frozenset(found["named"]),
        collected=frozenset(found["collected"]),
        untwinned=frozenset(found["untwinned"]),
    )


def named(ids: Iterable[str]) -> str:
    """Return a string that lists the first few ids."""
    every = list(ids)
    rest = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(test_id[:120] for test_id in every[:MAX_NAMED]) + rest
