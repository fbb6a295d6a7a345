"""Patches to a repository, scored in real sandboxes with a real git and a real pytest."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from headrace.buffer.types import Cause
from headrace.sandboxes.local import LocalProvider

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
shared = runpy.run_path(str(Path(__file__).parents[1] / "repositories.py"))
verdict_on, repository_task = shared["verdict_on"], shared["repository_task"]
exit_code_of_tests = shared["exit_code_of_tests"]
RIGHT = shared["RIGHT"]
SOLVE = f"printf '%s' {shlex.quote(RIGHT)} > calc.py"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[LocalProvider]:
    async with LocalProvider() as provider:
        yield provider


async def test_a_right_patch_is_solved(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, repository_task(), SOLVE)
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED), verdict


CHECK = {"check": "from calc import mean; result = [mean([]), mean([1, 3])]", "expected": "[0.0, 2.0]"}
REPORT_HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
PATCHED = "from _pytest.python import Function\nFunction.runtest = lambda self: None\n"
EQUAL = """
class Any(float):
    __eq__ = lambda *_: True
    __hash__ = None
def mean(numbers): return Any()
def last(numbers): return Any()
"""
SKIP = "import pytest\ndef mean(numbers): pytest.skip()\nlast = mean\n"
CHEATS = {
    "conftest makereport hook": f"printf '%s' {shlex.quote(REPORT_HOOK)} > conftest.py; cp conftest.py tests/",
    "os._exit(0) at import": "echo 'import os; os._exit(0)' > calc.py",
    "pytest.skip": f"printf '%s' {shlex.quote(SKIP)} > calc.py",
    "pytest.ini addopts=--co": "printf '[pytest]\naddopts = --co\n' > pytest.ini",
    "patched Function.runtest": f"printf '%s' {shlex.quote(PATCHED)} >> calc.py",
    "__eq__ always true": f"printf '%s' {shlex.quote(EQUAL)} > calc.py",
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
async def test_a_cheat_in_the_diff_fools_exit_codes_but_earns_nothing(provider: LocalProvider, cheat: str) -> None:
    task = repository_task(**CHECK) if cheat == CHEATS["__eq__ always true"] else repository_task()
    assert await exit_code_of_tests(provider, task, cheat) == 0
    verdict = await verdict_on(provider, task, cheat)
    assert (verdict.reward, verdict.cause in (Cause.FAILED, Cause.INVALID)) == (0.0, True), verdict


async def test_doing_nothing_is_failed(provider: LocalProvider) -> None:
    verdict = await verdict_on(provider, repository_task(), "true")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED), verdict
    assert "1 of 3 tests did not pass: tests/test_calc.py::test_mean_of_nothing" in verdict.detail
