"""Fails when functions, classes or folders grow beyond bounds, or an import closes a circle or goes upwards."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TypeAlias

from import_graph import ORDER, cycle, import_graph, misplaced

MAX_LINES, MAX_P95 = 70, 40
MAX_CLASS_LINES, MAX_METHODS = 300, 25
MAX_MODULES = 20
FOLDERS = (*ORDER, "scripts/benches")


Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


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


def large_classes(found: list[tuple[Definition, Path]]) -> list[str]:
    problems = []
    for node, path in found:
        if not isinstance(node, ast.ClassDef):
            continue
        lines = lines_of(node)
        methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        if lines > MAX_CLASS_LINES or methods > MAX_METHODS:
            bounds = f"at most {MAX_CLASS_LINES} and {MAX_METHODS}"
            problems.append(f"{path}:{node.lineno} {node.name}: {lines} lines and {methods} methods, {bounds}")
    return problems


def large_folders(root: Path) -> list[str]:
    problems = []
    for folder in sorted({path.parent for top in FOLDERS for path in (root / top).rglob("*.py")}):
        name, modules = str(folder.relative_to(root)), len(list(folder.glob("*.py")))
        if modules > MAX_MODULES:
            problems.append(f"{name}: {modules} modules, at most {MAX_MODULES}")
    return problems


def problems_of(root: Path) -> list[str]:
    """Everything that is out of bounds in the packages below `root`."""
    graph, found = import_graph(root), definitions(root)
    circle = cycle(graph)
    circles = [f"these import each other in a circle: {' -> '.join(circle)}"] if circle else []
    return [*circles, *misplaced(graph), *long_functions(found), *large_classes(found), *large_folders(root)]


def main() -> int:
    problems = problems_of(Path())
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
