"""Graph of imports between modules: finds cycles, and imports that go upwards in a package's order.

Imports for type checkers and those inside functions count like all others: a reader has to follow them too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ORDER: dict[str, tuple[str, ...]] = {
    "sandboxes": (
        *(
            "errors",
            "base",
            "capture",
            "kernel",
            "launcher",
            "command_streams",
            "private_folders",
            "key_files",
            "child_environment",
            "host_program",
            "images",
            "leftovers",
        ),
        *("leftovers", "local", "doctor", "e2b", "unprotected", "oci", "retry", "pool", "remote"),
        "simulated",
    ),
    "buffer": (
        *(
            "errors",
            "repositories",
            "task_parts",
            "verifiers",
            "tasks",
            "versions",
            "token_kinds",
            "step_scores",
            "breakdown",
            "types",
            "sanitizer",
            "codec",
            "packing",
            "row_limits",
        ),
        *("primitives", "core", "ledger", "audit", "datasets"),
    ),
    "policies": (
        *("cancellation", "errors", "transport_errors", "engine", "learner"),
        *("tokens", "models", "processes", "push", "cpu_engine", "sglang", "miniatures", "learners"),
    ),
    "serve": (
        *("conversation", "errors", "observing", "parsing", "rendering", "capture", "dialects", "exports"),
        *("gateway", "gateway_processes", "e2b_sandboxes", "e2b", "exec"),
    ),
    "actors": (
        *("errors", "section", "version", "chat", "templates", "in_sandbox", "record"),
        *("node_files", "slowness", "traces", "storage"),
        "runtime",
        *("simulated", "places", "engine_group", "services", "evaluation", "agents", "environments", "loop"),
        *("agent_kinds", "training", "exposition", "observer"),
        *("rollouts", "cluster", "mix", "run", "runs", "control", "held_out", "simulation", "tuning", "cli"),
    ),
}
"""Modules and folders of each package, lowest first: each may import those before it."""


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the dotted names (without `headrace.`) of the modules in the packages below `root`, each with the modules
    that it imports."""
    modules = dict(_modules(root))
    return {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for package in ORDER:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # What is imported may be a module or something in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            inner = name.removeprefix("headrace.")
            if inner != name and (found := inner if inner in modules else inner.rpartition(".")[0]) in modules:
                yield found


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, with the first one repeated at the end; empty if there is no
    cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def misplaced(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the violations of each package's order: imports that go upwards in it, and modules or folders missing from
    it."""
    units = sorted({(name.split(".")[0], name.split(".")[1]) for name in graph if "." in name})
    problems = [f"{package}/{unit} is missing from ORDER" for package, unit in units if unit not in ORDER[package]]
    for name, imported in sorted(graph.items()):
        problems += [
            f"{name} imports {other}, which is above it" for other in sorted(imported) if _is_above(other, name)
        ]
    return problems


def _is_above(other: str, name: str) -> bool:
    (package, *place), (its_package, *its_place) = name.split("."), other.split(".")
    if package != its_package or not place or not its_place:
        return False
    order = ORDER[package]
    return {place[0], its_place[0]} <= set(order) and order.index(its_place[0]) > order.index(place[0])
