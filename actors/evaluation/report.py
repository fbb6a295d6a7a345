"""The reports of test runs: when one is believed, and what they say about the ids that must pass. Pure.

Invariants:
- A report is believed only when every session that began has ended and every canary came out as it must.
- An id that is missing did not pass. Exit codes are not looked at.
- A test that passed counts when its twin ended in our exception. Only the untouched repository excuses a test: from
  passing where it fails as expected there too, and from its twin where it has none there either.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

MAX_NAMED: Final = 5


class ReportUntrusted(Exception):
    """Nothing can be concluded from this run: the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One session of pytest as the monitor saw it: the names of its canaries, and records of (event, id, result)."""

    must_pass: str
    must_fail: str
    ended: bool
    records: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Test id -> what happened to it, each time it ran; `uncollected` are modules that could not be read or were
    skipped as a whole, `named` the test functions that the source of modules of the first kind defines. `collected`
    and `untwinned` are told by sessions of twins only: all tests, and those that cannot have a twin."""

    results: Mapping[str, frozenset[str]]
    uncollected: Mapping[str, str]
    named: frozenset[str] = frozenset()
    collected: frozenset[str] = frozenset()
    untwinned: frozenset[str] = frozenset()

    @property
    def skipped(self) -> frozenset[str]:
        """Ids and modules that were skipped."""
        return self.having("skipped") | {name for name, result in self.uncollected.items() if result == "skipped"}

    def having(self, result: str) -> frozenset[str]:
        """Ids that had this result at least once."""
        return frozenset(test_id for test_id, results in self.results.items() if result in results)

    def only(self, result: str) -> frozenset[str]:
        """Ids that had this result each time."""
        return frozenset(test_id for test_id, results in self.results.items() if results == {result})

    def standing_for(self, required: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Required id -> the ids of this report it stands for: itself, or all that begin with it, cut at a blank."""
        by_cut: dict[str, list[str]] = defaultdict(list)
        for test_id in self.results:
            by_cut[test_id.split(" ")[0]].append(test_id)
        return {
            test_id: (test_id,) if test_id in self.results else tuple(by_cut.get(test_id, ())) for test_id in required
        }

    def not_passed(self, required: Iterable[str], excused: Collection[str] = ()) -> tuple[str, ...]:
        """Those of the required ids that did not pass, in their order. `excused` are ids that may end as xfailed."""

        def passed(test_id: str) -> bool:
            return self.results[test_id] <= ({"passed", "xfailed"} if test_id in excused else {"passed"})

        return tuple(
            test_id for test_id, ids in self.standing_for(required).items() if not ids or not all(map(passed, ids))
        )

    def any_failed(self) -> tuple[str, ...]:
        """Tests and modules that failed, sorted."""
        modules = {name for name, result in self.uncollected.items() if result != "skipped"}
        return tuple(sorted(self.having("failed") | modules))


def missing_beside(report: Report, untouched: Report) -> tuple[str, ...]:
    """Tests of the untouched repository that did not run, sorted."""
    functions = {test_id.split("[")[0] for test_id in report.results}
    return tuple(sorted((untouched.collected - report.results.keys()) | (untouched.named - functions)))


def without_twin(passed: Iterable[str], twins: Report) -> tuple[str, ...]:
    """Those of the ids that passed whose twins did not end in our exception, in their order."""
    confirmed = twins.only("twin")
    return tuple(test_id for test_id in passed if test_id not in confirmed)


def excused_twins(untouched: Report) -> frozenset[str]:
    """Tests that cannot have a twin: the untouched report of twins says so, or has one that passes without our
    exception (an item of a plugin that runs another body)."""
    return untouched.untwinned | untouched.only("passed")


def read_report(sessions: Sequence[Session]) -> Report:
    """Raises ReportUntrusted."""
    if not sessions:
        raise ReportUntrusted("no session of pytest began")
    for session in sessions:
        if not session.ended:
            raise ReportUntrusted("a session of pytest did not come to its end")
        _check_canaries(session)
    return believe(sessions)


def believe(sessions: Sequence[Session]) -> Report:
    """The report of code that nobody patched, also where its tests end the session."""
    results: dict[str, set[str]] = defaultdict(set)
    uncollected: dict[str, str] = {}
    found: dict[str, set[str]] = {"named": set(), "collected": set(), "untwinned": set()}
    for session in sessions:
        for event, test_id, result in session.records:
            if event == "test" and not _is_canary(test_id, session):
                results[test_id].add(result)
            elif event == "collect":
                uncollected[test_id] = result
            elif event in found:
                found[event].add(test_id)
    return Report(
        results={test_id: frozenset(ends) for test_id, ends in results.items()},
        uncollected=uncollected,
        **{event: frozenset(ids) for event, ids in found.items()},
    )


def _is_canary(test_id: str, session: Session) -> bool:
    return test_id.rsplit("::", 1)[-1] in (f"test_{session.must_pass}", f"test_{session.must_fail}")


def _check_canaries(session: Session) -> None:
    for name, wanted in ((session.must_pass, "passed"), (session.must_fail, "failed")):
        found = {result for _, test_id, result in session.records if test_id.endswith(f"::test_{name}")}
        if not found:
            raise ReportUntrusted(f"the canary that must have {wanted} did not run")
        if found != {wanted}:
            raise ReportUntrusted(f"a canary that must have {wanted} has {', '.join(sorted(found))}")


def named(ids: Iterable[str]) -> str:
    """The first few of them, for a detail."""
    every = list(ids)
    rest = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(test_id[:120] for test_id in every[:MAX_NAMED]) + rest
