"""The report of a test run: when it is believed, and what it says about the ids that must pass. Pure.

Invariants:
- A report is believed only when every session that began has ended and every canary came out as it must.
- An id that is missing did not pass. Exit codes are not looked at.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

PASSING: Final = frozenset({"passed", "xfailed"})
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
    skipped as a whole."""

    results: Mapping[str, frozenset[str]]
    uncollected: Mapping[str, str]

    @property
    def skipped(self) -> frozenset[str]:
        """Ids and modules that were skipped."""
        tests = {test_id for test_id, results in self.results.items() if "skipped" in results}
        return frozenset(tests | {name for name, result in self.uncollected.items() if result == "skipped"})

    def not_passed(self, required: Iterable[str]) -> tuple[str, ...]:
        """Those of the required ids that did not pass, in their order."""
        by_cut: dict[str, set[str]] = defaultdict(set)
        for test_id, results in self.results.items():
            by_cut[test_id.split(" ")[0]] |= results
        return tuple(
            test_id for test_id in required if not _passed(self.results.get(test_id) or by_cut.get(test_id) or ())
        )

    def any_failed(self) -> tuple[str, ...]:
        """Tests and modules that failed, sorted."""
        tests = {test_id for test_id, results in self.results.items() if "failed" in results}
        return tuple(sorted(tests | {name for name, result in self.uncollected.items() if result != "skipped"}))


def _passed(results: Collection[str]) -> bool:
    return bool(results) and PASSING.issuperset(results)


def read_report(sessions: Sequence[Session]) -> Report:
    """Raises ReportUntrusted."""
    if not sessions:
        raise ReportUntrusted("no session of pytest began")
    results: dict[str, set[str]] = defaultdict(set)
    uncollected: dict[str, str] = {}
    for session in sessions:
        if not session.ended:
            raise ReportUntrusted("a session of pytest did not come to its end")
        _check_canaries(session)
        for event, test_id, result in session.records:
            if event == "test" and not _is_canary(test_id, session):
                results[test_id].add(result)
            elif event == "collect":
                uncollected[test_id] = result
    return Report(results={test_id: frozenset(found) for test_id, found in results.items()}, uncollected=uncollected)


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
