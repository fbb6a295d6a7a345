"""A plugin of pytest that reports the result of each test id, and runs canaries among the tests.

Loaded under a random name, from a folder that only root writes to. It reports through a socket of which the environment
tells the number, and gets its secrets through it; without one it does nothing. Invariants:
- Results come from the exception that ended a phase, not from what a hook made of it.
- A pair of canaries, one that must pass and one that must fail, runs beside the tests of every module, and as a test
  case of unittest. Whatever turns failures into passes, or runs nothing, turns the canaries too.
- Canaries change neither the outcome of the session nor its limits.
"""

from __future__ import annotations

import json
import os
import random
import socket
import unittest
from typing import Any

import pytest

MAX_PARENTS = 64
_given = os.environ.pop("HEADRACE_REPORT", "")
os.environ.pop("PYTEST_PLUGINS", None)
_NAME = f"reporter-{random.getrandbits(64):x}"


class Reporter:
    """Hooks of one session. `results` holds the worst phase of the test that runs."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.key = ""
        self.say(event="start")
        with channel.makefile("rb") as lines:
            self.key, self.must_pass, self.must_fail = json.loads(lines.readline())
        self.phases: dict[str, list[str]] = {}
        self.failed_canaries = 0

    def say(self, **record: Any) -> None:
        self.channel.sendall(json.dumps(dict(record, key=self.key)).encode() + b"\n")

    def pytest_configure(self, config: Any) -> None:
        config.option.maxfail = 0
        config.option.continue_on_collection_errors = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        if not hasattr(session, "obj"):
            # pytest before 7 asks the parent of every function for it (its support of nose).
            session.obj = None
        canaries = [*self.cases(session), *self.functions(session, session)]
        places: dict[int, int] = {}
        for place, item in enumerate(items):
            places.setdefault(id(item.getparent(pytest.Module)), place)
        for place in sorted(places.values(), reverse=True)[-MAX_PARENTS:]:
            pair = list(self.functions(session, items[place].getparent(pytest.Module) or session))
            random.shuffle(pair)
            items[place:place] = pair
        items.extend(canaries)

    def functions(self, session: Any, parent: Any) -> list[Any]:
        """A pair of test functions below a module that holds tests: what is patched for those holds for them."""

        def passing() -> None:
            assert len(self.must_pass) == 16

        def failing() -> None:
            assert len(self.must_fail) == 17

        pairs = ((self.must_pass, passing), (self.must_fail, failing))
        make = getattr(pytest.Function, "from_parent", None) or (
            lambda node, **rest: pytest.Function(parent=node, **rest)
        )
        return [make(parent, name="test_" + name, callobj=function) for name, function in pairs]

    def cases(self, session: Any) -> list[Any]:
        """The same as methods of a unittest.TestCase: those run another way."""
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

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        outcome = yield
        report = outcome.get_result()
        self.phases.setdefault(item.nodeid, []).append(self.phase(report, call))
        if report.when == "teardown":
            phases = self.phases.pop(item.nodeid)
            result = next((word for word in ("failed", "skipped", "xfailed") if word in phases), "passed")
            self.failed_canaries += result == "failed" and item.name == "test_" + self.must_fail
            self.say(event="test", id=item.nodeid, result=result)

    @staticmethod
    def phase(report: Any, call: Any) -> str:
        if call.excinfo is None:
            return "failed" if report.outcome == "failed" else "passed"
        if report.outcome == "skipped":
            return "xfailed" if hasattr(report, "wasxfail") else "skipped"
        return "failed"

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.say(event="collect", id=report.nodeid, result=report.outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> None:
        if int(exitstatus) == 1 and session.testsfailed <= self.failed_canaries:
            session.exitstatus = 0
        self.say(event="end")


def pytest_addhooks(pluginmanager: Any) -> None:
    """The first hook that knows the plugin manager."""
    if _given and not pluginmanager.has_plugin(_NAME):
        channel = socket.socket(fileno=int(_given))
        channel.set_inheritable(False)
        pluginmanager.register(Reporter(channel), _NAME)
