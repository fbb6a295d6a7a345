"""Fails when functions, classes or folders exceed their bounds, when too many private functions have a single caller,
or when modules, or neighbours in a folder, import each other. Bounds are far away: nothing is split to keep one."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import TypeAlias

from import_graph import PACKAGES, circles, import_graph

MAX_LINES, MAX_P95 = 70, 40
MAX_CLASS_LINES = 400
"""Lines of a class with those of its bases in the product."""
MAX_ENTRIES, MAX_DEPTH = 24, 4
MAX_SINGLE_CALLER_SHARE = 0.08
FEW_FUNCTIONS = 100
"""Number of functions below which the share is not checked."""
FOLDERS = (*PACKAGES, "scripts/benches", "scripts/gpu_checks")


Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Named: TypeAlias = ast.Name | ast.Attribute


def definitions(root: Path) -> list[tuple[Definition, Path]]:
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    trees = ((path.relative_to(root), ast.parse(path.read_text(encoding="utf-8"))) for path in paths)
    return [(node, path) for path, tree in trees for node in ast.walk(tree) if isinstance(node, Definition)]


def lines_of(node: Definition) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def long_functions(found: list[tuple[Definition, Path]]) -> list[str]:
    lengths = sorted(
        (lines_of(node), f"{path}:{node.lineno} {node.name}")
        for node, path in found
        if not isinstance(node, ast.ClassDef)
    )
    problems = [f"{where}: {lines} lines, at most {MAX_LINES}" for lines, where in lengths if lines > MAX_LINES]
    if lengths and (p95 := lengths[int(len(lengths) * 0.95)][0]) > MAX_P95:
        problems.append(f"95th percentile of function lengths is {p95} lines, at most {MAX_P95}")
    return problems


def large_classes(root: Path) -> list[str]:
    """Report classes of too many lines: a class that is cut in two by inheritance has the lines of both."""
    own: dict[str, int] = {}
    bases: dict[str, list[str]] = {}
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        module = ".".join(("headrace", *path.relative_to(root).with_suffix("").parts))
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        origin = {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
            own[f"{module}.{node.name}"] = lines_of(node)
            names = [base.id for base in node.bases if isinstance(base, ast.Name)]
            bases[f"{module}.{node.name}"] = [origin.get(name, f"{module}.{name}") for name in names]

    def lines(name: str) -> int:
        return own[name] + sum(lines(base) for base in bases[name] if base in own)

    bounds = f"lines with its bases, at most {MAX_CLASS_LINES}"
    return [f"{name}: {lines(name)} {bounds}" for name in own if lines(name) > MAX_CLASS_LINES]


def name_of(node: ast.AST) -> str:
    """Return the last name in an expression; empty if it has none."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def single_callers(found: list[tuple[Definition, Path]], root: Path) -> list[str]:
    """Report too large a share of private functions that are called once and not otherwise named in their module: such
    functions hide nothing, and their code belongs in the caller."""
    total, single = 0, []
    for path in sorted({path for _, path in found}):
        nodes = list(ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))))
        names = Counter(name_of(node) for node in nodes if isinstance(node, Named))
        calls = Counter(name_of(node.func) for node in nodes if isinstance(node, ast.Call))
        functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        total += len(functions)
        private = (name for name in functions if name.startswith("_") and not name.startswith("__"))
        single += [f"{path} {name}" for name in private if names[name] == calls[name] == 1]
    if total < FEW_FUNCTIONS or len(single) <= MAX_SINGLE_CALLER_SHARE * total:
        return []
    share, most = len(single) / total, MAX_SINGLE_CALLER_SHARE
    return [f"{share:.1%} of the functions are private and have one caller, at most {most:.0%}; one is {single[-1]}"]


def large_folders(root: Path) -> list[str]:
    problems = []
    for folder in sorted({path.parent for top in FOLDERS for path in (root / top).rglob("*.py")}):
        name, entries = (
            folder.relative_to(root),
            len([entry for entry in folder.iterdir() if entry.name != "__pycache__"]),
        )
        if entries > MAX_ENTRIES:
            problems.append(f"{name}: {entries} files and folders, at most {MAX_ENTRIES}")
        if len(name.parts) > MAX_DEPTH:
            problems.append(f"{name}: {len(name.parts)} folders deep, at most {MAX_DEPTH}")
    return problems


def problems_of(root: Path) -> list[str]:
    """Return every violated bound in the packages below `root`."""
    found = definitions(root)
    sizes = [*long_functions(found), *large_classes(root), *single_callers(found, root), *large_folders(root)]
    return [*circles(import_graph(root)), *sizes]


def main() -> int:
    problems = problems_of(Path())
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
