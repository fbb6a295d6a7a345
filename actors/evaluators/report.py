"""The report of a test run: when it is believed, and what it says about the ids that must pass. Pure.

Invariants:
- A report is believed only when every session that began has ended and every canary came out as it must.
- An id that is missing did not pass. Exit codes are not looked at.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

PASSING: Final = frozenset({"passed", "xfailed"})
MAX_NAMED: Final = 5


class ReportUntrusted(Exception):
    """Nothing can be concluded from this run: the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """Names of the test that must pass and of the one that must fail, 16 characters each, new for every run."""

    must_pass: str
    must_fail: str


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


def read_report(text: str, canaries: Canaries) -> Report:
    """Raises ReportUntrusted."""
    results: dict[str, set[str]] = defaultdict(set)
    uncollected: dict[str, str] = {}
    begun = ended = 0
    for record in _records(text):
        event, test_id, result = record.get("event"), str(record.get("id", "")), str(record.get("result", ""))
        begun += event == "start"
        ended += event == "end"
        if event == "test":
            results[test_id].add(result)
        elif event == "collect":
            uncollected[test_id] = result
    if begun == 0:
        raise ReportUntrusted("no session of pytest began")
    if begun != ended:
        raise ReportUntrusted(f"{begun - ended} of {begun} test sessions did not come to their end")
    _check_canaries(results, canaries)
    return Report(
        results={test_id: frozenset(found) for test_id, found in results.items() if not _is_canary(test_id, canaries)},
        uncollected=uncollected,
    )


def _records(text: str) -> Iterable[dict[str, Any]]:
    for line in text.split("\n"):
        try:
            record = json.loads(line) if line else None
        except (ValueError, RecursionError) as error:
            raise ReportUntrusted("the report holds a line that is none of ours") from error
        if isinstance(record, dict):
            yield record


def _is_canary(test_id: str, canaries: Canaries) -> bool:
    return test_id.rsplit("::", 1)[-1] in (f"test_{canaries.must_pass}", f"test_{canaries.must_fail}")


def _check_canaries(results: Mapping[str, set[str]], canaries: Canaries) -> None:
    for name, wanted in ((canaries.must_pass, "passed"), (canaries.must_fail, "failed")):
        found = [result for test_id, result in results.items() if test_id.endswith(f"test_{name}")]
        if not found:
            raise ReportUntrusted(f"the canary that must have {wanted} did not run")
        if any(result != {wanted} for result in found):
            raise ReportUntrusted(f"a canary that must have {wanted} has {', '.join(sorted(set().union(*found)))}")


def named(ids: Iterable[str]) -> str:
    """The first few of them, for a detail."""
    every = list(ids)
    rest = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(test_id[:120] for test_id in every[:MAX_NAMED]) + rest
