"""Pure parts of the graders of repositories: equal parameters, kept baselines, and files with names of tests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from benches.cheating.repositories import REPOSITORIES

from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.diff_filter import FilterRules, filter_diff
from headrace.actors.evaluation.graders.report import Report, keeps
from headrace.actors.evaluation.graders.verdict import Verdict, broken, failed

REPORT = Report(
    results={"t::a": frozenset({"passed"})}, uncollected={"t": "failed"}, named=frozenset({"t::b"}), sessions=2
)


@pytest.mark.parametrize(
    ("before", "after", "is_kept"),
    [
        ("", '{"n": "1"}', True),
        ('{"n": "1"}', '{"n": "1"}', True),
        ('{"n": "1"}', '{"n": "2"}', False),
        ('{"n": ["m.Case", {"a": "1"}]}', '{"n": ["m.Case", {"a": "1", "b": "2"}]}', True),
        ('{"n": ["m.Case", {"a": "1", "b": "2"}]}', '{"n": ["m.Case", {"a": "1"}]}', False),
        ('{"n": ["builtins.list", 1, "1"]}', '{"n": ["builtins.list", 2, "1", "2"]}', False),
        ('{"n": "1"}', '{"n": ', False),
        ('"a digest"', '"another"', False),
    ],
)
def test_parameters_are_compared_by_value(before: str, after: str, is_kept: bool) -> None:
    assert keeps(before, after) is is_kept


def damage(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"damaged")


async def test_what_was_found_without_changes_is_measured_once_in_a_run(tmp_path: Path) -> None:
    task, measured = REPOSITORIES[0].task(), []

    async def report() -> Report:
        measured.append("report")
        return REPORT

    async def verdict() -> Verdict:
        measured.append("verdict")
        return failed("untouched")

    for _ in range(2):
        baselines = Baselines(tmp_path / "untouched")
        found = await asyncio.gather(*(baselines.report(task, report) for _ in range(3)))
        assert found == [REPORT] * 3
        assert await baselines.verdict(task, verdict) == failed("untouched")
    assert measured == ["report", "verdict"]
    await baselines.report(replace(task, instruction="another"), report)
    damage(tmp_path / "untouched")
    assert await Baselines(tmp_path / "untouched").report(task, report) == REPORT
    assert measured == ["report", "verdict", "report", "report"]


def files_of(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_broken_check_is_tried_again(tmp_path: Path) -> None:
    measured = []

    async def verdict() -> Verdict:
        measured.append(1)
        return broken("a slow machine")

    baselines = Baselines(tmp_path)
    for _ in range(2):
        await baselines.verdict(REPOSITORIES[0].task(), verdict)
    assert len(measured) == 2
    assert files_of(tmp_path) == []


def new_file(path: str) -> bytes:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".encode()
    )


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("pkg/unit_test.py", True),
        ("test_scratch.py", True),
        ("tests/test_new.py", False),
        ("pkg/test_calc.py", False),
        ("conftest.py", False),
    ],
)
def test_a_new_file_with_the_name_of_a_test_is_kept_and_not_collected(path: str, is_kept: bool) -> None:
    rules = FilterRules(test_files=frozenset({"tests/test_calc.py"}), new_names=True)
    found = filter_diff(new_file(path), rules, {})
    assert (found.kept, found.uncollected) == (((path,), (path,)) if is_kept else ((), ()))
    assert filter_diff(new_file(path), replace(rules, new_names=False), {}).kept == ()
