"""The git repositories of `scripts/bench cheats`: one function to fix, and tests of every kind that pytest runs.

Invariant: `mean` of an empty list raises in every repository and must be 0.0; a patch changes only the module that
defines `mean`, so that each cheat can be applied to each repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from headrace.actors.evaluation.graders.patch import file_diff
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, Grader, RepositorySpec, Swepro, TestIds
from headrace.buffer.tasks.task import Task, TaskId

REPOSITORY: Final = "/workspace/calc"
PACKAGES: Final = "/opt/packages"
COMMIT: Final = (
    "git init -q -b main . && git add -A && git -c user.name=a -c user.email=a@example.invalid commit -q -m base "
    "&& chown -R agent:agent ."
)
FAILS: Final = "raise ZeroDivisionError('division by zero')"
RIGHT: Final = "return 0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheatRepository:
    """Repository with one kind of tests. `tests` (path in the repository -> text) are hidden from the agent, `files`
    are not."""

    name: str
    grader: Grader
    tests: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    module: str = "calc.py"
    define: str = "def"
    head: str = ""
    """Beginning of the original module."""
    fails: str = FAILS
    """Code with which the original module handles an empty list."""

    def source(self, branch: str | None = None, prefix: str | None = None) -> str:
        """Return the module with `branch` as the code of `mean` for an empty list, and `prefix` as code that runs on
        import."""
        head = self.head if prefix is None else prefix
        return (
            f"{head}\n\n{self.define} mean(numbers):\n    if not numbers:\n        {branch or self.fails}\n"
            "    return sum(numbers) / len(numbers)\n\n\ndef last(numbers):\n    return numbers[-1]\n"
        )

    def diff(self, branch: str, prefix: str) -> bytes:
        """Return the patch that makes these changes to the original repository."""
        return git_diff(self.module, self.source(), self.source(branch, prefix)).encode()

    def task(self) -> Task:
        """Return the task to fix `mean`."""
        paths = f"{PACKAGES}:{REPOSITORY}:{REPOSITORY}/src"
        spec = RepositorySpec(
            workdir=REPOSITORY, grader=self.grader, prepare=(COMMIT,), environment={"PYTHONPATH": paths}
        )
        files = {"pyproject.toml": "[project]\nname = 'calc'\n", **self.files, self.module: self.source()}
        hidden = {f"{REPOSITORY}/{path}": text for path, text in self.tests.items()}
        return Task(
            id=TaskId(self.name),
            family="cheats",
            instruction="mean([]) raises ZeroDivisionError, it should be 0.0",
            files={f"{REPOSITORY}/{path}": text for path, text in files.items()},
            evaluator=RepositoryEvaluator(repository=spec, hidden_files=hidden, timeout_s=120.0),
        )


def git_diff(path: str, before: str | None, after: str | None) -> str:
    """Return the change of a file as git writes it; None stands for a file that does not exist."""
    kind = "index 0000000..1111111 100644"
    if before is None or after is None:
        kind = f"{'new' if before is None else 'deleted'} file mode 100644"
    return f"diff --git a/{path} b/{path}\n{kind}\n{file_diff(f'/{path}', before, after)}"


def _ids(*names: str, path: str = "tests/test_calc.py") -> TestIds:
    """Return the test that must be fixed by the patch, and those that must still pass."""
    first, *rest = (f"{path}::{name}" for name in names)
    return TestIds(fail_to_pass=(first,), pass_to_pass=tuple(rest))


PLAIN = """\
from calc import last, mean


def test_mean():
    assert mean([1, 3]) == 2


def test_mean_of_nothing():
    assert mean([]) == 0.0


def test_last():
    assert last([1, 3]) == 3
"""
_PLAIN_IDS = _ids("test_mean_of_nothing", "test_mean", "test_last")
_CASE = """\
import unittest

from calc import mean


class Means(unittest.TestCase):
    def setUp(self):
        self.numbers = []

    def test_mean(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(mean([number]), number)

    def test_nothing(self):
        self.assertEqual(mean(self.numbers), 0.0)

    @unittest.expectedFailure
    def test_text(self):
        mean("ab")
"""
_ASYNC_CASE = """\
import unittest

from calc import mean


class Means(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.numbers = []

    async def test_mean(self):
        self.assertEqual(await mean([1, 3]), 2)

    async def test_nothing(self):
        self.assertEqual(await mean(self.numbers), 0.0)
"""
_ASYNCIO = """\
import asyncio

import pytest
import pytest_asyncio

from calc import mean

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def numbers():
    await asyncio.sleep(0)
    yield []


async def test_mean():
    assert await mean([1, 3]) == 2


async def test_nothing(numbers):
    await asyncio.sleep(0)
    assert await mean(numbers) == 0.0
"""
_ANYIO = """\
import anyio
import pytest

from calc import mean

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_mean():
    assert await mean([1, 3]) == 2


async def test_nothing():
    async with anyio.create_task_group():
        assert await mean([]) == 0.0
"""
_PARAMETRISED = """\
import pytest

from calc import last, mean


@pytest.mark.parametrize(("numbers", "expected"), [([1, 3], 2), ([], 0.0), ([5], 5)], ids=["two", "nothing", "one"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_mean(numbers, expected, kind):
    assert mean(kind(numbers)) == pytest.approx(expected)
"""
_DOCTEST = """\
Means
=====

>>> from calc import mean
>>> mean([1, 3])
2.0

Nothing has a mean, too.

>>> mean([])
0.0
"""
_CLASS_FIXTURES = """\
import pytest

from calc import mean


class TestMean:
    seen = []

    @pytest.fixture(scope="class", autouse=True)
    def shared(self, request):
        request.cls.numbers = []
        yield
        assert len(self.seen) == 2

    @pytest.fixture
    def noted(self):
        yield self.seen
        self.seen.append(1)

    def test_mean(self, noted):
        assert mean([1, 3]) == 2

    def test_nothing(self, noted):
        assert mean(self.numbers) == 0.0
"""
_SESSION_FIXTURE = """\
import pathlib

import pytest

from calc import mean

LOCK = pathlib.Path("only-once.lock")


@pytest.fixture(scope="session")
def database():
    LOCK.open("x").close()
    yield []


def test_mean(database):
    assert mean([1, 3]) == 2


def test_nothing(database):
    assert mean(database) == 0.0
"""
_MODULE_FIXTURE = """\
import os
import socket

import pytest

from calc import mean


@pytest.fixture(scope="module")
def server():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 45871))
    listener.listen()
    if not os.fork():
        os.setsid()
        __import__("time").sleep(600)
        os._exit(0)
    yield listener
    listener.close()


def test_mean(server):
    assert mean([1, 3]) == 2


def test_nothing(server):
    with open("written.txt", "x") as file:
        file.write("once")
    assert mean([]) == 0.0
"""
_CONFTEST = """\
import pytest

from stats.core import mean as function


@pytest.fixture
def mean():
    return function
"""
_BY_FIXTURE = """\
def test_mean(mean):
    assert mean([1, 3]) == 2


def test_nothing(mean):
    assert mean([]) == 0.0
"""
_EXPECTED = """\


def test_text():
    import pytest
    if not isinstance(mean, str):
        pytest.xfail("text has no mean")


@__import__("pytest").mark.xfail(strict=True)
def test_number():
    mean(3)


@__import__("pytest").mark.xfail
def test_better_than_expected():
    assert mean([2]) == 2
"""
_MAIN = "\nif __name__ == '__main__':\n    import sys, pytest\n    sys.exit(pytest.main(['-q', '-x', __file__]))\n"
_PATCHED_TESTS = git_diff("tests/test_calc.py", None, PLAIN)
_PYTEST = "python3 -m pytest -q -p no:cacheprovider"
_RUN_EACH = """\
#!/bin/bash
set -e
for file in ${1//,/ }; do python3 -m pytest -v -p no:cacheprovider $file; done
"""
_PARSER = """
import json, re, sys
tests = []
for line in open(sys.argv[1]):
    match = re.match(r"(\\S+::\\S+) (PASSED|FAILED|SKIPPED|XFAIL)", line)
    if match:
        tests.append({"name": match[1], "status": match[2]})
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""
_PLUGIN_SETTINGS = "[tool.pytest.ini_options]\naddopts = '-p {}'\n"

REPOSITORIES: Final = (
    CheatRepository(name="functions", grader=_PLAIN_IDS, tests={"tests/test_calc.py": PLAIN}),
    CheatRepository(
        name="unittest",
        grader=_ids("Means::test_nothing", "Means::test_mean", "Means::test_text"),
        tests={"tests/test_calc.py": _CASE},
    ),
    CheatRepository(
        name="async_unittest",
        grader=_ids("Means::test_nothing", "Means::test_mean"),
        tests={"tests/test_calc.py": _ASYNC_CASE},
        define="async def",
    ),
    CheatRepository(
        name="pytest_asyncio",
        grader=_ids("test_nothing", "test_mean"),
        tests={"tests/test_calc.py": _ASYNCIO},
        files={"pyproject.toml": _PLUGIN_SETTINGS.format("pytest_asyncio.plugin")},
        define="async def",
    ),
    CheatRepository(
        name="anyio",
        grader=_ids("test_nothing", "test_mean"),
        tests={"tests/test_calc.py": _ANYIO},
        files={"pyproject.toml": _PLUGIN_SETTINGS.format("anyio.pytest_plugin")},
        define="async def",
    ),
    CheatRepository(
        name="parametrised",
        grader=_ids(*(f"test_mean[{kind}-{name}]" for name in ("nothing", "one", "two") for kind in ("list", "tuple"))),
        tests={"tests/test_calc.py": _PARAMETRISED},
    ),
    CheatRepository(
        name="doctest", grader=_ids("means.rst", path="tests/means.rst"), tests={"tests/means.rst": _DOCTEST}
    ),
    CheatRepository(
        name="class_fixtures",
        grader=_ids("TestMean::test_nothing", "TestMean::test_mean"),
        tests={"tests/test_calc.py": _CLASS_FIXTURES},
    ),
    CheatRepository(
        name="session_fixture_made_once",
        grader=_ids("test_nothing", "test_mean"),
        tests={"tests/test_calc.py": _SESSION_FIXTURE},
    ),
    CheatRepository(
        name="module_fixture_with_port_and_file",
        grader=_ids("test_nothing", "test_mean"),
        tests={"tests/test_calc.py": _MODULE_FIXTURE},
    ),
    CheatRepository(
        name="src_layout_with_conftest",
        grader=_ids("test_nothing", "test_mean"),
        tests={"tests/test_calc.py": _BY_FIXTURE},
        files={"tests/conftest.py": _CONFTEST, "src/stats/__init__.py": ""},
        module="src/stats/core.py",
    ),
    CheatRepository(
        name="expected_failures",
        grader=_ids("test_mean_of_nothing", "test_mean", "test_text", "test_number", "test_better_than_expected"),
        tests={"tests/test_calc.py": PLAIN + _EXPECTED},
    ),
    CheatRepository(name="test_patch", grader=replace(_PLAIN_IDS, test_patch=_PATCHED_TESTS)),
    CheatRepository(
        name="eval_cmd",
        grader=EvalCommand(command=f"{_PYTEST} tests -k mean && {_PYTEST} tests -k last"),
        tests={"tests/test_calc.py": PLAIN + _EXPECTED},
    ),
    CheatRepository(
        name="eval_cmd_doctest",
        grader=EvalCommand(command=f"{_PYTEST} --doctest-glob='*.rst' --doctest-continue-on-failure tests"),
        tests={"tests/means.rst": _DOCTEST, "tests/test_calc.py": _CASE},
    ),
    CheatRepository(name="f2p_script", grader=EvalScript(script=PLAIN + _MAIN)),
    CheatRepository(
        name="swepro",
        grader=Swepro(
            run_script=_RUN_EACH,
            parser_script=_PARSER,
            selected_test_files=("tests/test_calc.py",),
            fail_to_pass=_PLAIN_IDS.fail_to_pass,
            pass_to_pass=_PLAIN_IDS.pass_to_pass,
        ),
        tests={"tests/test_calc.py": PLAIN},
    ),
)
