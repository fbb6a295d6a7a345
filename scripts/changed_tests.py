"""Prints the test files that can tell of a change: those that lead to a file that has changed since a commit, directly
or through others. Usage: scripts/changed_tests.py COMMIT

A Python file leads to the modules that it imports or names in a string, as `python -m` takes them; a test also to the
`conftest.py` beside it if it takes a fixture of it, to a program that it starts, and to files that are not Python if it
names them or their folder. A change of what all tests share leads to all of them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from import_graph import PACKAGES, imported_names

ROOTS = {**{package: ("headrace", package) for package in PACKAGES}, "scripts": (), "tests": ()}
SHARED = ("pyproject.toml", "setup.py", "tests/conftest.py", "scripts/setup", "scripts/test")
NAME = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")
PROGRAMS = {
    "headrace": "headrace.actors.cli.app",
    "finished_run": "headrace.actors.cli.app",
    "bench": "benches.command",
    "soak": "benches.long_runs.soak",
}
"""The modules of programs, by the word with which a test starts one, or by the fixture that did."""


def modules(root: Path) -> dict[str, Path]:
    """Return the Python files of the checkout by the names under which they are imported."""
    found = {}
    for top, prefix in ROOTS.items():
        for path in (root / top).rglob("*.py"):
            parts = (*prefix, *path.relative_to(root / top).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def led_to(path: Path, names: Mapping[str, Path], root: Path) -> Iterator[Path]:
    """Yield the files to which a Python file leads."""
    tree, top = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root).parts[0]
    imported, words = set(imported_names(tree)), set()
    told = imported | {name.rpartition(".")[0] for name in imported}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
            found = NAME.findall(node.value)
            told |= {*found, *(f"headrace.{top}.{name}" for name in found)}  # launchers name modules of their package
        elif isinstance(node, ast.arg):
            words.add(node.arg)
    if top == "tests":
        told |= {PROGRAMS[word] for word in words & PROGRAMS.keys()}
        beside = path.with_name("conftest.py")
        if any(f"def {word}(" in beside.read_text(encoding="utf-8") for word in words if beside.is_file()):
            yield beside
    yield from (names[name] for name in told if name in names)


def changed(commit: str) -> list[str]:
    since = subprocess.run(["git", "diff", "--name-only", commit], capture_output=True, text=True, check=True).stdout
    new = ["git", "ls-files", "--others", "--exclude-standard"]
    return [*since.splitlines(), *subprocess.run(new, capture_output=True, text=True, check=True).stdout.splitlines()]


def tests_of(root: Path, files: list[str]) -> list[str]:
    """Return the test files that lead to any of these files."""
    names = modules(root)
    if set(SHARED).intersection(files):
        return ["tests"]
    leading: dict[Path, set[Path]] = defaultdict(set)
    for path in names.values():
        for other in led_to(path, names, root):
            leading[other].add(path)
    texts = {path: path.read_text(encoding="utf-8") for path in names.values() if path.is_relative_to(root / "tests")}
    waiting = [root / file for file in files]
    for path in [path for path in waiting if path.suffix != ".py"]:
        named = re.compile(rf"(?<![\w-]){re.escape(path.name)}(?![\w-])|[\"'/]{re.escape(path.parent.name)}[\"'/]")
        waiting += [test for test, text in texts.items() if named.search(text)]
    reached: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += leading[path]
    tests = (path for path in reached if path.name.startswith("test_") and path.is_file())
    return sorted(str(path.relative_to(root)) for path in tests if path.is_relative_to(root / "tests"))


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    try:
        print("\n".join(tests_of(root, changed(sys.argv[1]))))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} {error.cmd[1]}: {error.stderr.strip()}")
