"""What `.ci/run` runs once more: a few tests that failed beside others, never many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "few_failed.py"
PASSED = '<testcase classname="tests.unit.test_a" name="test_passed@test_a" />'
SKIPPED = '<testcase classname="tests.unit.test_a" name="test_s@test_a"><skipped message="no GPU" /></testcase>'
FAILED = '<testcase classname="tests.faults.test_b" name="test_b{0}[a - b.c]@ray"><failure>t</failure></testcase>'
ERROR = '<testcase classname="tests.unit.test_c" name="test_c"><error message="in its fixture">t</error></testcase>'


@pytest.mark.parametrize(
    ("cases", "told"),
    [
        ([PASSED, SKIPPED], ""),
        (
            [PASSED, FAILED.format(1), SKIPPED, ERROR],
            "tests/faults/test_b.py::test_b1[a - b.c]\ntests/unit/test_c.py::test_c\n",
        ),
        ([FAILED.format(number) for number in range(4)], ""),
    ],
)
def test_a_few_failed_tests_are_listed_by_name(tmp_path: Path, cases: list[str], told: str) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>')
    found = subprocess.run([sys.executable, str(SCRIPT), str(report)], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, told), found.stderr


def test_a_missing_report_is_a_failure(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "x")], capture_output=True, timeout=60)
    assert (found.returncode != 0, found.stdout) == (True, b"")
