"""When a report of tests is believed, and what it says."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from headrace.actors.evaluation.graders.report import (
    PytestSession,
    ReportUntrusted,
    excused_twins,
    missing_beside,
    named,
    read_report,
    without_twin,
)
from headrace.actors.evaluation.in_sandbox import source

GOOD, BAD = "a" * 16, "b" * 16
CANARIES = (("test", f"t.py::test_{GOOD}", "passed"), ("test", f"t.py::test_{BAD}", "failed"))
RUN = (
    ("test", "t.py::one", "passed"),
    ("test", "t.py::two", "failed"),
    ("test", "t.py::three[a b]", "xfailed"),
    ("test", "t.py::three[a c]", "passed"),
    ("test", "t.py::four", "skipped"),
    ("collect", "u.py", "skipped"),
    ("collect", "v.py", "failed"),
)
SESSION = PytestSession(must_pass=GOOD, must_fail=BAD, ended=True, records=(*RUN, *CANARIES))


def test_passed_failed_and_skipped_tests_are_read_from_a_report() -> None:
    report = read_report([SESSION])
    assert report.not_passed(["t.py::one", "t.py::two", "t.py::three[a c]", "t.py::four", "t.py::five"]) == (
        "t.py::two",
        "t.py::four",
        "t.py::five",
    )
    assert report.any_failed() == ("t.py::two", "v.py")
    assert report.skipped == {"t.py::four", "u.py"}
    assert not [test_id for test_id in report.results if GOOD in test_id or BAD in test_id]


def test_an_id_truncated_at_a_blank_matches_all_ids_with_that_prefix() -> None:
    better = replace(SESSION, records=[row for row in SESSION.records if row[2] != "xfailed"])
    assert read_report([better]).not_passed(["t.py::three[a"]) == ()
    assert read_report([better]).standing_for(["t.py::three[a", "x"]) == {
        "t.py::three[a": ("t.py::three[a c]",),
        "x": (),
    }
    worse = replace(better, records=(*better.records, ("test", "t.py::three[a d]", "failed")))
    assert read_report([worse]).not_passed(["t.py::three[a"]) == ("t.py::three[a",)


def test_an_expected_failure_counts_only_if_it_is_excused() -> None:
    report = read_report([SESSION])
    assert report.not_passed(["t.py::three[a b]"]) == ("t.py::three[a b]",)
    assert report.not_passed(["t.py::three[a b]"], excused=["t.py::three[a b]"]) == ()
    assert report.not_passed(["t.py::two"], excused=["t.py::two"]) == ("t.py::two",)


TWINS = read_report(
    [
        replace(
            SESSION,
            records=(
                ("test", "t.py::one", "twin"),
                ("test", "t.py::two", "failed"),
                ("test", "t.py::own", "passed"),
                ("test", "t.py::yaml", "passed"),
                ("untwinned", "t.py::yaml", "YamlItem"),
                ("test", "t.py::three[a]", "twin"),
                ("named", "v.py::test_new", ""),
                ("collected", "t.py::own", ""),
                ("collected", "t.py::two", ""),
                ("collected", "t.py::three[a]", ""),
                *CANARIES,
            ),
        )
    ]
)


def test_a_test_is_confirmed_by_a_twin_that_raised_the_canary_exception() -> None:
    passed = ("t.py::one", "t.py::two", "t.py::own", "t.py::gone")
    assert without_twin(passed, TWINS) == ("t.py::two", "t.py::own", "t.py::gone")
    assert excused_twins(TWINS) == {"t.py::yaml", "t.py::own"}


def test_tests_in_the_untouched_repository_must_have_run() -> None:
    assert missing_beside(read_report([SESSION]), TWINS) == (
        "t.py::own",
        "t.py::three[a]",
        "v.py::test_new",
    )
    new = replace(SESSION, records=(("test", "v.py::test_new[1]", "passed"), *CANARIES))
    assert "v.py::test_new" not in missing_beside(read_report([new]), TWINS)


def test_a_test_that_ran_twice_must_pass_twice() -> None:
    again = replace(SESSION, records=(("test", "t.py::one", "failed"), *CANARIES))
    assert read_report([SESSION, again]).not_passed(["t.py::one"]) == ("t.py::one",)
    later = replace(SESSION, records=(("test", "t.py::two", "passed"), *CANARIES))
    assert read_report([SESSION, later]).not_passed(["t.py::two"]) == ("t.py::two",)


@pytest.mark.parametrize(
    ("sessions", "said"),
    [
        ([], "no pytest session started"),
        ([replace(SESSION, ended=False)], "a pytest session did not end"),
        ([SESSION, replace(SESSION, ended=False)], "a pytest session did not end"),
        ([replace(SESSION, records=RUN)], "that must be reported as passed did not run"),
        ([replace(SESSION, records=(*RUN, CANARIES[0]))], "that must be reported as failed did not run"),
        (
            [replace(SESSION, records=(*CANARIES, ("test", f"t.py::test_{BAD}", "passed")))],
            "reported as failed, passed",
        ),
        (
            [replace(SESSION, records=(*CANARIES, ("test", f"u.py::test_{GOOD}", "skipped")))],
            "reported as passed, skipped",
        ),
        ([replace(SESSION, must_pass=BAD, must_fail=GOOD)], "that must be reported as passed was reported as failed"),
        ([SESSION, replace(SESSION, must_pass="c" * 16)], "did not run"),
    ],
)
def test_invalid_reports_are_refused(sessions: list[PytestSession], said: str) -> None:
    with pytest.raises(ReportUntrusted, match=said):
        read_report(sessions)


@pytest.mark.parametrize("name", ["apply", "canary_plugin", "collect", "compute", "monitor"])
def test_sandbox_programs_are_valid_for_old_interpreters(name: str) -> None:
    assert ast.parse(source(name), feature_version=(3, 7)).body


def test_long_lists_name_only_the_first_few() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named(map(str, range(8))) == "0, 1, 2, 3, 4 and 3 more"
