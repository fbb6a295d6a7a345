"""Prints which files of a pristine repository serve its tests only, among those that a patch touches.

Runs as root; its standard input is JSON with `workdir`, `paths` (relative), `tests` (the files that the grader names)
and `hidden` (text by path of those that are not there yet). A file that serves tests lies below a folder of tests, or
has a name like `testing`, or defines assertions that tests import; no product code imports it, directly or through
others of them; and it has no tests of its own, as `testing.py` has with `test_testing.py`. Files that are not Python
follow their folder.
Invariant: imports are read from the source, so nothing of the repository runs, and only files that mention a module's
name are parsed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

FOLDERS = frozenset({"test", "tests", "testing", "testdata", "test_data", "__tests__"})
STEMS = frozenset({"test", "tests", "testing", "conftest"})
ASSERTIONS = re.compile(r"^\s*def assert", re.MULTILINE)
TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py|tests\.py|conftest\.py")
SKIPPED = frozenset({".git", "node_modules", "__pycache__", ".tox", ".venv", "venv"})
MAX_BYTES = 1 << 20
HIDDEN: dict[str, str] = {}


def stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def folders_of(path: str) -> list[str]:
    return os.path.dirname(path).lower().split("/")


@lru_cache(None)
def text_of(path: str) -> str:
    if path in HIDDEN:
        return HIDDEN[path]
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return ""


@lru_cache(None)
def sources() -> tuple[str, ...]:
    found = []
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [os.path.relpath(os.path.join(folder, name), ".") for name in files if name.endswith(".py")]
    return tuple(sorted({*found, *HIDDEN}))


def dotted(path: str) -> tuple[str, ...]:
    """Return the parts of a module's name, from the outermost folder that is a package, or from its file."""
    parts = path[: -len(".py")].split("/")
    begin = len(parts) - 1
    while begin > 0 and os.path.exists("/".join([*parts[:begin], "__init__.py"])):
        begin -= 1
    return tuple(parts[begin:-1] if parts[-1] == "__init__" else parts[begin:])


@lru_cache(None)
def imports(path: str) -> frozenset[tuple[str, ...]]:
    """Return the names of the modules that a file imports, and of what it takes from them."""
    try:
        tree = ast.parse(text_of(path))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(name for node in ast.walk(tree) for name in imported(node, path))


def imported(node: ast.AST, path: str) -> Iterator[tuple[str, ...]]:
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            here = dotted(path)
            up = node.level - (os.path.basename(path) == "__init__.py")
            base = (here[: len(here) - up] if up else here) + base
        yield base
        yield from ((*base, alias.name) for alias in node.names)


class Support:
    """The files of a repository that serve its tests, so far as they were asked for."""

    def __init__(self, tests: list[str]) -> None:
        self.tests = set(tests)
        self.known: dict[str, bool] = {}
        folders = {os.path.dirname(path) for path in tests if path.endswith(".py")} - {""}
        self.folders = {folder for folder in folders if not self.is_flat(folder)}

    def is_flat(self, folder: str) -> bool:
        """Return whether tests lie beside the code that they test."""
        beside = [path for path in sources() if os.path.dirname(path) == folder]
        code = {stem(path) for path in beside if not self.is_test(path)} - {"__init__"}
        if code & {re.sub("^test_|_test$", "", stem(path)) for path in beside if self.is_test(path)}:
            return True
        package = next((dotted(path) for path in beside if stem(path) == "__init__"), ("",))
        tops = {part for path in sources() for part in dotted(path)[:1]}
        used = {name for path in beside if self.is_test(path) for name in imports(path) if name and name[0] in tops}
        return bool(code) and all(name[: len(package)] == package or name[0] in code for name in used)

    def is_test(self, path: str) -> bool:
        return path in self.tests or bool(TEST_FILE.fullmatch(os.path.basename(path))) or "tests" in folders_of(path)

    def is_candidate(self, path: str) -> bool:
        if any(path.startswith(folder + "/") for folder in self.folders) or FOLDERS.intersection(folders_of(path)):
            return True
        if not path.endswith(".py"):
            return False
        asserts = ASSERTIONS.search(text_of(path)) is not None
        return stem(path).lower() in STEMS or (asserts and any(self.importers(path, tests=True)))

    def serves_tests(self, path: str) -> bool:
        if path not in self.known:
            self.known[path] = True  # a cycle of modules that nobody else imports serves the tests, too
            own = {f"test_{stem(path)}.py", f"{stem(path)}_test.py"}
            has_own = any(os.path.basename(other) in own for other in sources())
            self.known[path] = not has_own and self.is_candidate(path) and not self.is_used(path)
        return self.known[path]

    def is_used(self, path: str) -> bool:
        """Return whether product code imports a file, or a module beside one that is no Python."""
        modules = [path] if path.endswith(".py") else self.modules_beside(path)
        users = (user for module in modules for user in self.importers(module, tests=False))
        return any(not self.is_candidate(user) or not self.serves_tests(user) for user in users)

    def modules_beside(self, path: str) -> list[str]:
        folder = os.path.dirname(path)
        return [other for other in sources() if os.path.dirname(other) == folder and not self.is_test(other)]

    def importers(self, path: str, *, tests: bool) -> Iterator[str]:
        """Yield the tests, or the other files, that import a module."""
        name = dotted(path)
        for other in sources():
            mentions = other != path and self.is_test(other) is tests and name and name[-1] in text_of(other)
            if mentions and any(found[: len(name)] == name for found in imports(other)):
                yield other

    def is_hidden_by(self, path: str) -> bool:
        """Return whether a new path would be imported in the place of a file that serves the tests."""
        parts = path.split("/")
        modules = ("/".join(parts[:length]) + ".py" for length in range(1, len(parts)))
        return any(os.path.exists(module) and self.serves_tests(module) for module in modules)


def main(given: dict[str, Any]) -> None:
    os.chdir(given["workdir"])
    HIDDEN.update((path, text) for path, text in given["hidden"].items() if path.endswith(".py"))
    support = Support(given["tests"])
    chosen = [
        path
        for path in given["paths"]
        if (support.serves_tests(path) if os.path.lexists(path) else support.is_hidden_by(path))
    ]
    json.dump(chosen, sys.stdout)


if __name__ == "__main__":
    main(json.load(sys.stdin))
