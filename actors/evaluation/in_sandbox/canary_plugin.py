"""A pytest plugin that reports the result of each test, and runs canaries among the tests or turns tests into twins.

It is loaded under a random name, from a folder that only root can write to. It reports and receives its secrets through
a socket whose number is in the environment; without a socket it does nothing. Invariants:
- Results come from the exception that ended a phase, not from hooks that changed it.
- A pair of canaries, one that must pass and one that must fail, runs beside the tests of every module, as a unittest
  case and, if there are doctests, as a doctest. Code that turns failures into passes, or skips tests, affects the
  canaries too.
- In a twin session, every test runs its body and then raises a new exception object from this plugin, created after the
  body has returned. Only a test that ends with this very object is a `twin`; other plugins see a pass.
- Canaries and twins change neither the session's outcome nor its limits.
"""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import json
import os
import random
import socket
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MAX_PARENTS = 64
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SELECTIONS = ("keyword", "markexpr", "deselect", "lf", "last_failed")
_given = os.environ.pop("HEADRACE_REPORT", "")
os.environ.pop("PYTEST_PLUGINS", None)
_NAME = f"reporter-{random.getrandbits(64):x}"


class BodyReturned(Exception):
    """Raised by a twin after its body has returned."""


def make_twin(body: Any, end: Callable[[], None], without_end: Callable[[str], None]) -> Any:
    """Return the test function with a call to `end` after it; `without_end` receives the reason if that is
    impossible."""
    if inspect.iscoroutinefunction(body):

        @functools.wraps(body)
        async def twin(*args: Any, **named: Any) -> None:
            await body(*args, **named)
            end()

        return twin

    @functools.wraps(body)
    def plain_twin(*args: Any, **named: Any) -> Any:
        result = body(*args, **named)
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            without_end("its body runs after it returned")
            return result
        if hasattr(result, "addCallbacks"):
            without_end("its body returns a Deferred")
            return result
        return end()

    return plain_twin


def is_doctest(item: Any) -> bool:
    return isinstance(getattr(item, "dtest", None), doctest.DocTest) and hasattr(item, "runner")


def unwrapped(raised: Any) -> Any:
    """Return the exception that ended a phase, unwrapped from doctest errors and exception groups."""
    while True:
        inner = getattr(raised, "failures", None) or getattr(raised, "exceptions", None)
        if isinstance(inner, (list, tuple)) and len(inner) == 1:
            raised = inner[0]
        elif isinstance(raised, doctest.UnexpectedException):
            return raised.exc_info[1]
        else:
            return raised


def test_ids_in_source(collector: Any) -> Iterator[str]:
    """Yield the ids of the test functions in the source of a module that could not be imported."""
    with open(str(getattr(collector, "path", None) or collector.fspath), "rb") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            decorators = "".join(map(ast.dump, node.decorator_list))
            if collector.funcnamefilter(node.name) and "fixture" not in decorators:
                yield f"{collector.nodeid}::{node.name}"
        elif isinstance(node, ast.ClassDef):
            for name in test_methods(collector, node):
                yield f"{collector.nodeid}::{node.name}::{name}"


def test_methods(collector: Any, node: ast.ClassDef) -> list[str]:
    methods = [line.name for line in node.body if isinstance(line, FUNCTIONS)]
    if "__init__" in methods or "__test__" in "".join(ast.dump(line) for line in node.body):
        return []
    if any("TestCase" in ast.dump(base) for base in node.bases):
        return [name for name in methods if name.startswith("test")]
    return list(filter(collector.funcnamefilter, methods)) if collector.classnamefilter(node.name) else []


def comparisons() -> list[Callable[[], Any]]:
    """Return assertions that use the test tools, all of which must raise."""
    case = unittest.TestCase("__init__")

    def raises() -> None:
        with pytest.raises(ValueError):
            pass

    def approximately() -> None:
        assert pytest.approx(2.0) == 1.0

    def same_output() -> None:
        assert doctest.OutputChecker().check_output("1\n", "2\n", 0)

    return [
        lambda: case.assertEqual(1, 2),
        lambda: case.assertTrue(0),
        lambda: case.assertIn(1, []),
        lambda: case.assertAlmostEqual(1.0, 2.0),
        lambda: case.assertRaises(ValueError, int, 1),
        raises,
        approximately,
        same_output,
    ]


def all_raise() -> bool:
    for comparison in comparisons():
        try:
            comparison()
        except BaseException:  # noqa: BLE001 - failures of pytest are not Exceptions
            continue
        return False
    return True


class Reporter:
    """Pytest hooks of one session. `phases` holds the results that the running test has had so far."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.key = ""
        self.say(event="start")
        with channel.makefile("rb") as lines:
            self.key, self.must_pass, self.must_fail, self.twins = json.loads(lines.readline())
        self.phases: dict[str, list[str]] = {}
        self.raised: dict[Any, BodyReturned] = {}
        self.failed_canaries = 0

    def say(self, **record: Any) -> None:
        self.channel.sendall(json.dumps(dict(record, key=self.key)).encode() + b"\n")

    def pytest_configure(self, config: Any) -> None:
        config.option.maxfail = 0
        config.option.continue_on_collection_errors = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        if not hasattr(session, "obj"):
            # pytest before 7 reads it from the parent of every function (support of nose).
            session.obj = None
        for item in items if self.twins else ():
            self.say(event="collected", id=item.nodeid)
            if not isinstance(item, pytest.Function) and not is_doctest(item):
                self.say(event="untwinned", id=item.nodeid, result=type(item).__name__)
        canaries = [*self.cases(session), *self.functions(session, session), *self.doctests(items)]
        places: dict[int, int] = {}
        for place, item in enumerate(items):
            places.setdefault(id(item.getparent(pytest.Module)), place)
        for place in sorted(places.values(), reverse=True)[-MAX_PARENTS:]:
            pair = list(self.functions(session, items[place].getparent(pytest.Module) or session))
            random.shuffle(pair)
            items[place:place] = pair
        items.extend(canaries)

    def functions(self, session: Any, parent: Any) -> list[Any]:
        """Return a pair of canary functions in a test module, so that patches to its tests affect them too."""

        def passing() -> None:
            assert len(self.must_pass) == 16

        def failing() -> None:
            if all_raise():
                assert len(self.must_fail) == 17

        pairs = ((self.must_pass, passing), (self.must_fail, failing))
        make = getattr(pytest.Function, "from_parent", None) or (
            lambda node, **rest: pytest.Function(parent=node, **rest)
        )
        return [make(parent, name="test_" + name, callobj=function) for name, function in pairs]

    def cases(self, session: Any) -> list[Any]:
        """Return canaries as methods of a unittest.TestCase, which pytest runs differently."""
        from _pytest.unittest import UnitTestCase

        def passing(case: Any) -> None:
            case.assertEqual(len(self.must_pass), 16)

        def failing(case: Any) -> None:
            case.assertEqual(len(self.must_fail), 17)

        names = {"test_" + self.must_pass: passing, "test_" + self.must_fail: failing}
        case = type("TestCase" + self.must_pass[:4], (unittest.TestCase,), names)
        try:
            node = UnitTestCase.from_parent(session, name=case.__name__, obj=case)
            node.obj = case
            return list(node.collect())
        except (TypeError, AttributeError):
            return []

    def doctests(self, items: list[Any]) -> list[Any]:
        """Return canaries as doctests that use the runner of the first doctest."""
        made: list[Any] = []
        first: Any = next(filter(is_doctest, items), None)
        if not hasattr(first, "from_parent"):
            return made
        for name, output in ((self.must_pass, "1\n"), (self.must_fail, "2\n")):
            test = doctest.DocTest([doctest.Example("1\n", output)], {}, name, first.dtest.filename, None, "")
            made.append(first.from_parent(first.parent, name="test_" + name, runner=first.runner, dtest=test))
        return made

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        if self.twins and item.name not in ("test_" + self.must_pass, "test_" + self.must_fail):
            self.plant(item)
        yield

    def plant(self, item: Any) -> None:
        """Turn a test into its twin by replacing its body, the innermost part that all kinds of tests have."""

        def end() -> None:
            self.raised[item] = BodyReturned()
            raise self.raised[item]

        def without_end(reason: str) -> None:
            self.say(event="untwinned", id=item.nodeid, result=reason)

        if is_doctest(item):
            name = f"end_{random.getrandbits(64):x}"
            item.dtest.globs[name] = end
            item.dtest.examples.append(doctest.Example(name + "()\n", ""))
        elif isinstance(item, pytest.Function):
            item.obj = make_twin(item.obj, end, without_end)
            case = getattr(item, "_testcase", None) or getattr(item, "instance", None)
            if isinstance(case, unittest.TestCase):
                # Some pytest versions, and all for async methods, look up the method on the case.
                setattr(case, item.name, item.obj)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        outcome = yield
        report = outcome.get_result()
        ours = self.raised.pop(item, None)
        # A unittest case whose cleanup fails after its body has two exceptions; the first one is not enough.
        if (
            ours is not None
            and call.excinfo
            and unwrapped(call.excinfo.value) is ours
            and not getattr(item, "_excinfo", 0)
        ):
            report.outcome, report.longrepr, call.excinfo = "passed", None, None
            phase = "twin"
        else:
            phase = self.phase(report, call)
        self.phases.setdefault(item.nodeid, []).append(phase)
        if report.when == "teardown":
            phases = self.phases.pop(item.nodeid)
            result = next((word for word in ("failed", "skipped", "xfailed", "twin") if word in phases), "passed")
            self.failed_canaries += result == "failed" and item.name == "test_" + self.must_fail
            self.say(event="test", id=item.nodeid, result=result)

    @staticmethod
    def phase(report: Any, call: Any) -> str:
        if call.excinfo is None:
            return "failed" if report.outcome == "failed" else "passed"
        if report.outcome == "skipped":
            return "xfailed" if hasattr(report, "wasxfail") else "skipped"
        return "failed"

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: Any) -> Any:
        outcome = yield
        report = outcome.get_result()
        if report.outcome == "passed":
            return
        self.say(event="collect", id=report.nodeid, result=report.outcome)
        chosen = any(getattr(collector.config.option, name, None) for name in SELECTIONS)
        if report.outcome == "failed" and isinstance(collector, pytest.Module) and not chosen:
            try:
                for test_id in test_ids_in_source(collector):
                    self.say(event="named", id=test_id)
            except (OSError, SyntaxError, ValueError):
                pass

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        # Another plugin may raise here, as pytest's cache does where warnings are errors and it cannot write.
        yield
        if int(exitstatus) == 1 and session.testsfailed <= self.failed_canaries:
            session.exitstatus = 0
        self.say(event="end")


def pytest_addhooks(pluginmanager: Any) -> None:
    """Register the reporter, in the first hook that receives the plugin manager."""
    if _given and not pluginmanager.has_plugin(_NAME):
        channel = socket.socket(fileno=int(_given))
        channel.set_inheritable(False)
        pluginmanager.register(Reporter(channel), _NAME)
