"""Failures of the program that collects a patch: which of them the agent's files are blamed for."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.evaluation.graders.verdict import PatchRefused, ProgramFailed, collect_twice
from headrace.sandboxes.errors import ExecTimeout, LauncherGone, SandboxGone

WORKS = "the result"
FAILS = ProgramFailed("exit code 9")
SLOW = ExecTimeout("20 s")


@pytest.mark.parametrize(
    ("agent", "untouched", "expected"),
    [
        ([WORKS], [], WORKS),
        ([FAILS, FAILS], [WORKS], PatchRefused),
        ([SLOW, SLOW], [WORKS], PatchRefused),
        ([FAILS, WORKS], [WORKS], WORKS),
        ([FAILS], [FAILS], ProgramFailed),
        ([SLOW], [SLOW], ProgramFailed),
        ([FAILS], [SandboxGone("gone")], SandboxGone),
        ([SandboxGone("gone")], [], SandboxGone),
        ([FAILS, LauncherGone("gone")], [WORKS], LauncherGone),
    ],
    ids=["works", "fails", "slow", "once", "always-fails", "always-slow", "host-untouched", "host", "host-again"],
)
def test_only_a_program_that_works_on_the_untouched_files_blames_the_agent(
    agent: list[str | Exception], untouched: list[str | Exception], expected: str | type[Exception]
) -> None:
    left = {False: list(agent), True: list(untouched)}

    async def collect(is_untouched: bool) -> str:
        outcome = left[is_untouched].pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    if isinstance(expected, str):
        assert asyncio.run(collect_twice(collect)) == expected
    else:
        with pytest.raises(expected):
            asyncio.run(collect_twice(collect))
    assert left == {False: [], True: []}
