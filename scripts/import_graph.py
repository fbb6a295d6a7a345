"""Graph of imports between modules, and its shape: no cycles, and at no depth two neighbours that import each other.

Imports for type checkers and those inside functions count like all others: a reader has to follow them too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

PACKAGES: Final = ("sandboxes", "buffer", "policies", "serve", "actors")
Arrow: TypeAlias = tuple[str, str]


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the dotted names (without `headrace.`) of the modules in the packages below `root`, each with the modules
    that it imports."""
    modules = dict(_modules(root))
    return {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
        inner = name.removeprefix("headrace.")
        if inner != name and (found := inner if inner in modules else inner.rpartition(".")[0]) in modules:
            yield found


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere in it: each is a module, or something in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(graph: Mapping[str, set[str]]) -> dict[str, dict[Arrow, Arrow]]:
    """Return the imports between the entries of each folder, with one import of modules for each that shows it: what
    `a.b.c` imports of `a.d.e` is an arrow from `b` to `d` in the folder `a`, and `""` has those between packages."""
    found: dict[str, dict[Arrow, Arrow]] = defaultdict(dict)
    for name, imported in sorted(graph.items()):
        for other in sorted(imported):
            ours, theirs = name.split("."), other.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if depth is not None:
                found[".".join(ours[:depth])].setdefault((ours[depth], theirs[depth]), (name, other))
    return found


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the violations of order: modules that import each other in a cycle, and entries of a folder that do."""
    problems = []
    if circle := _cycle(graph):
        problems.append(f"these modules import each other in a cycle: {' -> '.join(circle)}")
    for folder, inside in sorted(arrows(graph).items()):
        neighbours: dict[str, set[str]] = defaultdict(set)
        for one, other in inside:
            neighbours[one].add(other)
        if circle := _cycle(neighbours):
            shown = (" imports ".join(inside[pair]) for pair in pairwise(circle))
            problems.append(f"neighbours in {folder or 'the top folder'} import each other: {', '.join(shown)}")
    return problems


def _cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return what imports each other in a cycle, with the first one repeated at the end; empty if there is no cycle."""
    try:
        TopologicalSorter({name: set(imported) for name, imported in graph.items()}).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []
