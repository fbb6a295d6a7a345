"""A pytest plugin that reports the result of each test, and runs canaries among the tests or turns tests into twins.

It is loaded under a random name, from a folder that only root can write to. It reports and receives its secrets through
a socket whose number is in the environment; without a socket it does nothing. Invariants:
- Results come from the exception that ended a phase, not from hooks that changed it.
- A pair of canaries, one that must pass and one that must fail, runs beside the tests of every module, as a unittest
  case and, if there are doctests, as a doctest. Code that turns failures into passes, or skips tests, affects the
  canaries too. Their names are made of words of the module's own tests; the report has their secret names.
- In a twin session, every test runs its body and then raises. Only a frame of the code that was made for this test,
  which has come to the end, proves that: no object that the code under test could find and use does.
- Whatever a result passes through is bound here, before any code of the repository runs.
- Canaries and twins change neither the session's outcome nor its limits. Tests run in this process and in one only,
  whatever the repository's options say.
"""

from __future__ import annotations

import os
import sys

# What is imported here is the standard library's, and a repository that has a module of that name still gets its own.
_path, _before = sys.path[:], set(sys.modules)
sys.path[:] = [entry for entry in _path if entry.startswith(os.path.dirname(os.__file__))]

import ast
import builtins
import dis
import doctest
import functools
import inspect
import json
import random
import re
import socket
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from fcntl import F_DUPFD_CLOEXEC, fcntl
from hashlib import sha256
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any

sys.path[:] = _path
for _module in set(sys.modules) - _before:
    _names = [os.path.join(entry, _module) for entry in _path if not entry.startswith(os.path.dirname(os.__file__))]
    if any(os.path.isfile(name + ".py") or os.path.isdir(name) for name in _names):
        del sys.modules[_module]

import pytest

# Builtins that the repository replaces must not change what this module does.
globals().update({name: value for name, value in vars(builtins).items() if not name.startswith("_")})
_quote = json.encoder.encode_basestring_ascii
_chance = random.SystemRandom()  # its state is not the tests', and no seed of theirs reaches it

MAX_PARENTS = 64
MAX_DESCRIPTOR = 1000
MAX_PARTS, MAX_PARAMETERS = 50, 1 << 14
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SELECTIONS = ("keyword", "markexpr", "deselect", "lf", "last_failed")
WHOLE = {"dist": "no", "tx": [], "numprocesses": 0, "looponfail": False, "forked": False, "boxed": False}
WHOLE.update({"stepwise": False, "maxfail": 0, "continue_on_collection_errors": True})
"""Options with which every test runs, and in this process: those of pytest, pytest-xdist and pytest-forked."""
_given = os.environ.pop("HEADRACE_REPORT", "")
os.environ.pop("PYTEST_PLUGINS", None)
_NAME = f"reporter-{os.urandom(8).hex()}"


class BodyReturned(Exception):
    """Raised by a twin after its body has returned."""


BODY, LATE, WARN, PROOF, ISINSTANCE, HASATTR = range(710001, 710007)
TWINS = f"""
def plain(*args, **named):
    result = {BODY}(*args, **named)
    if {ISINSTANCE}(result, {LATE}) or {HASATTR}(result, "__await__") or {HASATTR}(result, "addCallbacks"):
        {WARN}("its body runs after it returned")
        return result
    raise {PROOF}

async def coroutine(*args, **named):
    await {BODY}(*args, **named)
    raise {PROOF}
"""
"""The numbers stand for constants of the code, which no other code can change."""


def _templates() -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a number is no function
        return tuple(part for part in compile(TWINS, "twin", "exec").co_consts if isinstance(part, types.CodeType))


_PLAIN, _COROUTINE = _templates()
_RAISES = {
    code.co_name: [line.offset for line in dis.get_instructions(code) if line.opname == "RAISE_VARARGS"]
    for code in (_PLAIN, _COROUTINE)
}
_DOCTEST_RUN: Any = vars(doctest.DocTestRunner)["_DocTestRunner__run"]


def with_constants(code: Any, values: dict[int, Any]) -> Any:
    """Return code in which constants are replaced."""
    constants = tuple(values.get(value, value) if type(value) is int else value for value in code.co_consts)
    if hasattr(code, "replace"):
        return code.replace(co_consts=constants)
    names = "argcount kwonlyargcount nlocals stacksize flags code names varnames filename name firstlineno lnotab"
    given = [getattr(code, "co_" + name) for name in names.split()]
    make: Any = types.CodeType
    return make(*given[:6], constants, *given[6:], code.co_freevars, code.co_cellvars)


def copied(body: Any) -> Any:
    """Return a test function that changes of the original do not reach."""
    function = getattr(body, "__func__", body)
    if type(function) is not types.FunctionType:
        return body
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy: Any = functools.update_wrapper(types.FunctionType(function.__code__, *parts), function)
    copy.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copy, body.__self__) if isinstance(body, types.MethodType) else copy


def make_twin(body: Any, without_end: Callable[[str], None]) -> tuple[Any, Any]:
    """Return the twin of a test function and its code; `without_end` receives the reason if it cannot have an end."""
    body = copied(body)
    late = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
    values = {BODY: body, LATE: late, WARN: without_end, PROOF: BodyReturned}
    values.update({ISINSTANCE: isinstance, HASATTR: hasattr})
    is_coroutine = inspect.iscoroutinefunction(body) or getattr(getattr(body, "__code__", None), "co_flags", 0) & 0x180
    code = with_constants(_COROUTINE if is_coroutine else _PLAIN, values)
    return functools.wraps(body)(types.FunctionType(code, {})), code


def has_ended(raised: Any, code: Any) -> bool:
    """Return whether an exception comes from the end of a twin: its innermost frame is one of this very code, and has
    stopped there."""
    if type(raised) is not BodyReturned or raised.__traceback__ is None:
        return False
    frames = [raised.__traceback__]
    while frames[-1].tb_next is not None:
        frames.append(frames[-1].tb_next)
    if isinstance(code, doctest.DocTest):
        run = next((part.tb_frame for part in frames if part.tb_frame.f_code is _DOCTEST_RUN.__code__), None)
        return run is not None and run.f_locals.get("examplenum") == len(code.examples) - 1
    frame = frames[-1].tb_frame
    return frame.f_code is code and frame.f_lasti in _RAISES[code.co_name]


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


def shown(value: Any, depth: int = 3) -> str:
    """Return a value as JSON without addresses. Public attributes become a JSON object, so that the grader can accept
    an added attribute and refuse a changed value."""
    kind = type(value)  # and no `isinstance`, which asks proxies what they stand for
    if value is None or kind in (bool, int, float, complex, str, bytes, range):
        return _quote(repr(value)[:200])
    is_named = issubclass(kind, (type, types.FunctionType, types.ModuleType))
    name = _quote(f"{kind.__module__}.{getattr(value, '__qualname__', '') if is_named else kind.__qualname__}")
    if depth == 0 or is_named:
        return name
    try:
        return shown_inside(name, value, kind, depth)
    except Exception:  # noqa: BLE001 - what an object of the repository raises
        return name


def shown_inside(name: str, value: Any, kind: Any, depth: int) -> str:
    if kind is dict:
        value = list(value.items())
    if kind is dict or issubclass(kind, (list, tuple, set, frozenset)):
        parts = [shown(each, depth - (kind is not dict)) for each in list(value)[:MAX_PARTS]]
        parts = sorted(parts) if kind in (set, frozenset) else parts
        return f"[{', '.join([name, str(len(value)), *parts])}]"
    inside = getattr(value, "__dict__", None)
    if type(inside) is not dict:
        return name
    # Which functions an object of the package holds is the package's own concern.
    parts = [
        f"{_quote(str(key)[:100])}: {_quote('callable') if callable(each) else shown(each, depth - 1)}"
        for key, each in list(inside.items())[:MAX_PARTS]
        if not str(key).startswith("_")
    ]
    return f"[{name}, {{{', '.join(parts)}}}]"


def parameters(item: Any) -> str:
    """Return what a test is called with, or a digest of it if that is long."""
    text = ", ".join(f"{_quote(name)}: {shown(value)}" for name, value in sorted(item.callspec.params.items()))
    return f"{{{text}}}" if len(text) < MAX_PARAMETERS else _quote(sha256(text.encode()).hexdigest())


def reporting(channel: socket.socket, key: str) -> Callable[..., None]:
    """Return the function that sends a record, which looks nothing up when it is called."""
    send, quote = channel.sendall, _quote

    def say(event: str, test: str = "", result: str = "") -> None:
        line = '{"event": %s, "id": %s, "result": %s, "key": %s}\n'
        send((line % (quote(event), quote(test), quote(result), quote(key))).encode())

    return say


def opened(number: int) -> socket.socket:
    """Return the channel under a high number, which tests that close the low ones leave alone."""
    limit = min(getrlimit(RLIMIT_NOFILE)[0], MAX_DESCRIPTOR)
    high = fcntl(number, F_DUPFD_CLOEXEC, max(limit - 8, 3))
    os.close(number)
    return socket.socket(fileno=high)


class Reporter:
    """Pytest hooks of one session. `phases` holds the results that the running test has had so far."""

    def __init__(self, channel: socket.socket) -> None:
        reporting(channel, "")("start")
        with channel.makefile("rb") as lines:
            key, *secrets, self.twins, self.ignored = json.loads(lines.readline())
        self.say = reporting(channel, key)
        self.phases: dict[str, list[str]] = {}
        self.planted: dict[Any, Any] = {}
        """The code of a running twin, or its doctest."""
        self.must_pass, self.must_fail = secrets
        self.canaries: dict[Any, str] = {}
        """Secret names of the canaries."""
        self.names: set[str] = set()
        """Names of tests that are taken."""
        self.failed_canaries = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: Any) -> None:
        for name in WHOLE.keys() & vars(config.option).keys():
            setattr(config.option, name, WHOLE[name])
        config.option.ignore = [*(config.option.ignore or []), *self.ignored]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        if not hasattr(session, "obj"):
            # pytest before 7 reads it from the parent of every function (support of nose).
            session.obj = None
        for item in items if self.twins else ():
            self.say("collected", item.nodeid)
            if not isinstance(item, pytest.Function) and not is_doctest(item):
                self.say("untwinned", item.nodeid, type(item).__name__)
        for item in items:
            if hasattr(item, "callspec"):
                self.say("parameters", item.nodeid, parameters(item))
        words = sorted({word for item in items for word in re.findall("[a-z]{2,}", item.name.lower())} - {"test"})
        self.names.update(item.name.partition("[")[0] for item in items)
        canaries = [*self.cases(session, words), *self.functions(session, session, words), *self.doctests(items, words)]
        places: dict[int, int] = {}
        for place, item in enumerate(items):
            places.setdefault(id(item.getparent(pytest.Module)), place)
        for place in sorted(places.values(), reverse=True)[-MAX_PARENTS:]:
            items[place:place] = self.functions(session, items[place].getparent(pytest.Module) or session, words)
        items.extend(canaries)

    def named(self, words: list[str]) -> dict[str, str]:
        """Return unused names for a pair of canaries, with their secret names, in any order."""
        names: list[str] = []
        while len(names) < 2:
            chosen = _chance.sample(words, min(len(words), _chance.randint(2, 4))) or ["result"]
            name = "_".join(["test", *chosen])
            while name in self.names:
                name += f"_{_chance.randint(2, 99)}"
            self.names.add(name)
            names.append(name)
        secrets = [self.must_pass, self.must_fail]
        _chance.shuffle(secrets)
        return dict(zip(names, secrets))

    def body(self, secret: str, parent: Any) -> Callable[[], None]:
        """Return a canary as if its code were from a file of tests."""
        path = str(getattr(parent, "path", None) or parent.fspath)
        wanted = 1 if secret == self.must_pass else 2
        text = f"def canary():\n    if {wanted} == 1 or all_raise():\n        assert {wanted} == 1\n"
        found: dict[str, Any] = {"all_raise": all_raise}
        exec(compile(text, path, "exec"), found)
        return found["canary"]  # type: ignore[no-any-return]

    def functions(self, session: Any, parent: Any, words: list[str]) -> list[Any]:
        """Return a pair of canary functions in a test module, so that patches to its tests affect them too."""
        make = getattr(pytest.Function, "from_parent", None) or (
            lambda node, **rest: pytest.Function(parent=node, **rest)
        )
        made = []
        for name, secret in self.named(words).items():
            made.append(make(parent, name=name, callobj=self.body(secret, parent)))
            self.canaries[made[-1]] = secret
        return made

    def cases(self, session: Any, words: list[str]) -> list[Any]:
        """Return canaries as methods of a unittest.TestCase, which pytest runs differently."""
        if not session.config.pluginmanager.has_plugin("unittest"):
            return []
        from _pytest.unittest import UnitTestCase

        def passing(case: Any) -> None:
            case.assertEqual(1, 1)

        def failing(case: Any) -> None:
            case.assertEqual(1, 2)

        names = self.named(words)
        bodies = {name: passing if secret == self.must_pass else failing for name, secret in names.items()}
        case = type("".join(map(str.title, next(iter(names)).split("_"))), (unittest.TestCase,), bodies)
        try:
            node = UnitTestCase.from_parent(session, name=case.__name__, obj=case)
            node.obj = case
            made = list(node.collect())
        except (TypeError, AttributeError):
            return []
        self.canaries.update((item, names[item.name]) for item in made)
        return made

    def doctests(self, items: list[Any], words: list[str]) -> list[Any]:
        """Return canaries as doctests that use the runner of the first doctest."""
        made: list[Any] = []
        first: Any = next(filter(is_doctest, items), None)
        if not hasattr(first, "from_parent"):
            return made
        for name, secret in self.named(words).items():
            output = "1\n" if secret == self.must_pass else "2\n"
            test = doctest.DocTest([doctest.Example("1\n", output)], {}, name, first.dtest.filename, None, "")
            made.append(first.from_parent(first.parent, name=name, runner=first.runner, dtest=test))
            self.canaries[made[-1]] = secret
        return made

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        if self.twins and item not in self.canaries:
            self.plant(item)
        yield

    def plant(self, item: Any) -> None:
        """Turn a test into its twin by replacing its body, the innermost part that all kinds of tests have."""

        def without_end(reason: str) -> None:
            self.say("untwinned", item.nodeid, reason)

        if is_doctest(item):
            if getattr(type(item.runner), "_DocTestRunner__run", None) is not _DOCTEST_RUN:
                without_end("its runner is not the standard library's")
            name = f"end_{os.urandom(8).hex()}"
            item.dtest.globs[name] = BodyReturned
            item.dtest.examples.append(doctest.Example(f"raise {name}\n", ""))
            self.planted[item] = item.dtest
        elif isinstance(item, pytest.Function):
            item.obj, self.planted[item] = make_twin(item.obj, without_end)
            case = getattr(item, "_testcase", None) or getattr(item, "instance", None)
            if isinstance(case, unittest.TestCase):
                # Some pytest versions, and all for async methods, look up the method on the case.
                setattr(case, item.name, item.obj)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        outcome = yield
        report = outcome.get_result()
        planted = self.planted.get(item) if call.when == "call" else None
        # A unittest case whose cleanup fails after its body has two exceptions; the first one is not enough.
        if (
            planted is not None
            and call.excinfo
            and has_ended(unwrapped(call.excinfo.value), planted)
            and not getattr(item, "_excinfo", 0)
        ):
            report.outcome, report.longrepr, call.excinfo = "passed", None, None
            phase = "twin"
        else:
            phase = self.phase(report, call)
        self.phases.setdefault(item.nodeid, []).append(phase)
        if report.when == "teardown":
            self.planted.pop(item, None)
            phases = self.phases.pop(item.nodeid)
            result = next((word for word in ("failed", "skipped", "xfailed", "twin") if word in phases), "passed")
            secret = self.canaries.get(item)
            self.failed_canaries += result == "failed" and secret == self.must_fail
            self.say("test", f"{item.nodeid}::test_{secret}" if secret else item.nodeid, result)

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
        self.say("collect", report.nodeid, report.outcome)
        chosen = any(getattr(collector.config.option, name, None) for name in SELECTIONS)
        if report.outcome == "failed" and isinstance(collector, pytest.Module) and not chosen:
            try:
                for test_id in test_ids_in_source(collector):
                    self.say("named", test_id)
            except (OSError, SyntaxError, ValueError):
                pass

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        # Another plugin may raise here, as pytest's cache does where warnings are errors and it cannot write.
        yield
        if int(exitstatus) == 1 and session.testsfailed <= self.failed_canaries:
            session.exitstatus = 0
        self.say("end")


def pytest_addhooks(pluginmanager: Any) -> None:
    """Register the reporter, in the first hook that receives the plugin manager."""
    if _given and not pluginmanager.has_plugin(_NAME):
        pluginmanager.register(Reporter(opened(int(_given))), _NAME)
        sys.modules.pop(__name__, None)
