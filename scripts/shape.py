"""Fails when a function is longer than 70 lines or the 95th percentile of all functions passes 40."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDERS = ("actors", "buffer", "policies", "sandboxes", "serve")
MAX_LINES, MAX_P95 = 70, 40


def function_lengths(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.lineno} {node.name}") for node in functions
    ]


def main() -> int:
    lengths = sorted(
        pair for folder in FOLDERS for path in Path(folder).rglob("*.py") for pair in function_lengths(path)
    )
    p95 = lengths[int(len(lengths) * 0.95)][0]
    too_long = [pair for pair in lengths if pair[0] > MAX_LINES]
    for lines, where in too_long:
        print(f"{where}: {lines} lines, at most {MAX_LINES}")
    if p95 > MAX_P95:
        print(f"95th percentile of function lengths is {p95} lines, at most {MAX_P95}")
    return 1 if too_long or p95 > MAX_P95 else 0


if __name__ == "__main__":
    sys.exit(main())
